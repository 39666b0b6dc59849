from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwise.errors import StrategyError
from meshwise.strategy import PRESETS, Strategy, parse, parse_list
from meshwise.strategy.strategy import (
    ALIASES,
    BATCH_NORM,
    CHECKPOINTING,
    KEYS,
    PRECISIONS,
    SCHEDULES,
)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    values = {
        "data_parallel_size": draw(st.integers(1, 8)),
        "tensor_parallel_size": draw(st.integers(1, 8)),
        "pipeline_parallel_size": draw(st.integers(1, 6)),
        "zero_stage": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "num_virtual_stages": draw(st.integers(1, 3)),
        "num_micro_batches": draw(st.integers(1, 12)),
        "checkpointing": draw(st.sampled_from(CHECKPOINTING)),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "batch_norm": draw(st.sampled_from(BATCH_NORM)),
    }
    try:
        return Strategy(**values)
    except StrategyError:
        assume(False)
        raise


@given(strategies())
def test_text_reads_back_as_the_same_strategy(strategy: Strategy) -> None:
    assert parse(strategy.text).at(strategy.num_devices) == strategy
    assert str(strategy) == strategy.text


@given(strategies())
def test_text_is_one_word(strategy: Strategy) -> None:
    assert len(strategy.text.split()) == 1
    assert len(parse_list([strategy.text])) == 1


@given(strategies(), st.integers(1, 20))
def test_batch_sizes_multiply_up(strategy: Strategy, micro_batch_size: int) -> None:
    global_batch_size = micro_batch_size * strategy.num_micro_batches * strategy.data_parallel_size
    assert strategy.micro_batch_size(global_batch_size) == micro_batch_size
    assert strategy.local_batch_size(global_batch_size) == micro_batch_size * strategy.num_micro_batches


PRESETS_AT_4 = {
    "data": "data=4",
    "zero1": "zero=1,data=4",
    "zero2": "zero=2,data=4",
    "zero3": "zero=3,data=4",
    "tensor": "tensor=4",
    "gpipe": "pipeline=4,schedule=gpipe,micro_batches=8",
    "1f1b": "pipeline=4,schedule=1f1b,micro_batches=8",
    "interleaved": "pipeline=4,schedule=interleaved,virtual_stages=2,micro_batches=8",
    "pipedream": "pipeline=4,schedule=pipedream",
    "pipedream-vsync": "pipeline=4,schedule=pipedream-vsync",
    "pipedream-2bw": "pipeline=4,schedule=pipedream-2bw,micro_batches=8",
}


@pytest.mark.parametrize(("preset", "expected"), PRESETS_AT_4.items())
def test_presets_take_all_devices(preset: str, expected: str) -> None:
    strategy = parse(preset).at(4)
    assert strategy is not None
    assert strategy.text == expected
    assert strategy.num_devices == 4
    assert parse(preset).required_devices is None


def test_every_preset_is_checked_above() -> None:
    assert set(PRESETS_AT_4) | {"single"} == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_on_one_device_is_single(preset: str) -> None:
    assert parse(preset).at(1) == Strategy()


def test_checkpointing_and_precision_stay_on_one_device() -> None:
    strategy = parse("gpipe,checkpointing=full,precision=bf16").at(1)
    assert strategy == Strategy(checkpointing="full", precision="bf16")


def test_single_needs_exactly_one_device() -> None:
    assert parse("single").required_devices == 1
    assert parse("single").at(2) is None


@pytest.mark.parametrize(("alias", "preset"), ALIASES.items())
def test_aliases(alias: str, preset: str) -> None:
    assert parse(alias).at(2) == parse(preset).at(2)


def test_named_sizes_fix_the_device_count() -> None:
    request = parse("data=2,pipeline=2")
    assert request.required_devices == 4
    assert request.at(2) is None
    strategy = request.at(4)
    assert strategy is not None
    assert strategy.schedule == "1f1b"
    assert strategy.num_micro_batches == 4


def test_a_preset_shares_devices_with_the_sizes_named_beside_it() -> None:
    strategy = parse("pipedream,data=2").at(8)
    assert strategy is not None
    assert strategy.text == "data=2,pipeline=4,schedule=pipedream"


def test_a_preset_whose_own_axis_is_named_no_longer_fills() -> None:
    assert parse("gpipe,pipeline=2").required_devices == 2


def test_axes_multiply() -> None:
    strategy = parse("zero=3,data=2,tensor=2").at(4)
    assert strategy == Strategy(zero_stage=3, data_parallel_size=2, tensor_parallel_size=2)


def test_lists_separate_by_space_semicolon_or_a_bare_preset() -> None:
    texts = ["data zero1;zero2", "gpipe,micro_batches=8,1f1b", "data=2,tensor=2"]
    expected = ["data", "zero1", "zero2", "gpipe,micro_batches=8", "1f1b", "data=2,tensor=2"]
    assert [request.text for request in parse_list(texts)] == expected


def test_all_is_every_preset_and_repeats_count_once() -> None:
    assert [request.text for request in parse_list(["all", "data"])] == list(PRESETS)


def test_key_order_does_not_matter() -> None:
    assert parse("tensor=2,data=2").text == parse("data=2,tensor=2").text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zer1", "'zer1' is no strategy; did you mean 'zero1'?"),
        ("dat=2", "'dat' in 'dat=2' is no strategy key; did you mean 'data'?"),
        ("schedule=gpip,pipeline=2", "schedule=gpip is unknown; did you mean 'gpipe'?"),
        ("data=two", "data=two is not a whole number; write for example data=2"),
        ("data=2,data=4", "'data' is given twice in 'data=2,data=4'; separate strategies by spaces"),
        ("", "no strategy given; known presets: " + ", ".join(PRESETS)),
        ("data tensor", "'data tensor' names 2 strategies where one is wanted; give one of them"),
    ],
)
def test_reading_says_what_is_wrong_and_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_devices_that_do_not_divide() -> None:
    with pytest.raises(StrategyError) as caught:
        parse("data,tensor=2,pipeline=2").at(10)
    assert str(caught.value) == (
        "10 devices do not divide into tensor 2 × pipeline 2 = 4; use 8 or 12 devices, or change one of the sizes"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data_parallel_size": 0}, "data=0 is no size; sizes are whole numbers from 1"),
        ({"zero_stage": 4}, "zero=4 does not exist; ZeRO stages are 0, 1, 2 and 3"),
        ({"precision": "double"}, "precision=double is unknown; known: fp32, bf16, fp64"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline=2 has no schedule; add one of gpipe, 1f1b, interleaved, pipedream, pipedream-vsync, "
            "pipedream-2bw",
        ),
        ({"schedule": "gpipe"}, "schedule=gpipe needs a pipeline; add pipeline=2 or drop the schedule"),
        (
            {"pipeline_parallel_size": 2, "schedule": "1f1b", "num_virtual_stages": 2},
            "schedule=1f1b with virtual_stages=2 cannot be: several stages a device are what "
            "schedule=interleaved means; use schedule=interleaved,virtual_stages=2",
        ),
        (
            {"pipeline_parallel_size": 2, "schedule": "interleaved", "num_micro_batches": 2},
            "schedule=interleaved with virtual_stages=1 cannot be: several stages a device are what "
            "schedule=interleaved means; use schedule=interleaved,virtual_stages=2",
        ),
        (
            {"pipeline_parallel_size": 2, "schedule": "pipedream", "zero_stage": 1, "data_parallel_size": 2},
            "pipedream keeps whole weight versions on every stage, which zero=1 would shard; use schedule=1f1b with "
            "ZeRO, or zero=0",
        ),
        (
            {"pipeline_parallel_size": 4, "schedule": "pipedream-2bw", "num_micro_batches": 2},
            "pipedream-2bw with micro_batches=2 needs at least as many micro-batches as stages; use micro_batches=4",
        ),
        (
            {
                "pipeline_parallel_size": 4,
                "schedule": "interleaved",
                "num_virtual_stages": 2,
                "num_micro_batches": 6,
            },
            "interleaved runs micro-batches in rounds of pipeline=4 and 6 does not divide into them; use "
            "micro_batches=4 or 8",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(values: dict[str, object], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy(**values)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_asynchronous_means_stale() -> None:
    asynchronous = {name for name in PRESETS if (s := parse(name).at(4)) is not None and s.asynchronous}
    assert asynchronous == {"pipedream", "pipedream-vsync", "pipedream-2bw"}


def test_every_attribute_has_a_key() -> None:
    assert set(KEYS.values()) == {field.name for field in dataclasses.fields(Strategy)}

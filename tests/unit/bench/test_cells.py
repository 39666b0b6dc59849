"""Which trainings a survey consists of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwise.bench.cells import Cells, expand, safe_name
from meshwise.bench.options import SurveyOptions
from meshwise.errors import InputError, StrategyError
from meshwise.strategy import PRESETS
from meshwise.strategy.legal import ModelFacts

CHAIN = ModelFacts(name="m", num_layers=8, tensor_sizes=(("heads", 4),))
NO_CHAIN = ModelFacts(name="m", no_pipeline="is not a chain of layers; use data")


def cells(*strategies: str, facts: ModelFacts = CHAIN, batch: int = 24, **options: Any) -> Cells:
    asked = SurveyOptions(model="m", strategies=strategies, **options)
    return expand(asked, facts=facts, global_batch_size=batch)


def names(found: Cells) -> list[tuple[str, int]]:
    return [(cell.preset, cell.num_devices) for cell in found.cells]


def test_all_presets_are_one_run_on_one_device() -> None:
    found = cells("all", devices=(1, 2))
    assert names(found)[0] == ("single", 1)
    assert [preset for preset, count in names(found) if count == 2] == [name for name in PRESETS if name != "single"]
    assert sum(count == 1 for _, count in names(found)) == 1


def test_the_one_device_baseline_is_called_single_whoever_asked_for_it() -> None:
    assert names(cells("zero1", devices=(1, 2))) == [("single", 1), ("zero1", 2)]


def test_two_texts_for_one_strategy_run_once() -> None:
    assert names(cells("data", "data=2", devices=(2,))) == [("data", 2)]


def test_named_sizes_run_only_where_they_fit() -> None:
    assert names(cells("data", "data=2,tensor=2", devices=(1, 2, 4))) == [
        ("single", 1),
        ("data", 2),
        ("data", 4),
        ("data=2,tensor=2", 4),
    ]


def test_named_sizes_without_their_device_count_say_which_to_add() -> None:
    with pytest.raises(InputError, match=r"data=2,tensor=2 needs 4 devices .* use --devices 1,2,4$"):
        cells("data=2,tensor=2", devices=(1, 2))


def test_single_asked_for_by_name_needs_one_device() -> None:
    with pytest.raises(InputError, match=r"single needs 1 device and .* use --devices 1,2$"):
        cells("single", "data", devices=(2,))
    assert names(cells("all", devices=(2,)))[0] == ("data", 2)


def test_partly_named_sizes_are_skipped_aloud_where_they_do_not_divide() -> None:
    found = cells("zero1,tensor=2", devices=(1, 2, 4))
    assert names(found) == [("zero1,tensor=2", 2), ("zero1,tensor=2", 4)]
    assert found.notes == ("zero1,tensor=2 does not fit on 1 devices (1 is no multiple of 2); skipped there",)


def test_partly_named_sizes_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(StrategyError, match="3 devices do not divide into tensor 2; use 2 or 4 devices"):
        cells("zero1,tensor=2", devices=(3,))


def test_what_was_named_must_be_possible() -> None:
    with pytest.raises(StrategyError, match="m is not a chain of layers"):
        cells("gpipe", facts=NO_CHAIN, devices=(2,))
    with pytest.raises(StrategyError, match="m is not a chain of layers"):
        cells("all", "gpipe", facts=NO_CHAIN, devices=(2,))


def test_what_only_all_brought_in_is_kept_as_refused() -> None:
    found = cells("all", facts=NO_CHAIN, devices=(1, 2))
    assert "gpipe" in [cell.preset for cell in found.refused]
    assert all("is not a chain" in cell.refused for cell in found.refused)
    assert [cell.preset for cell, _ in found.runs(1)] == ["single", "data", "zero1", "zero2", "zero3", "tensor"]


def test_a_survey_in_which_nothing_can_run_is_refused() -> None:
    with pytest.raises(StrategyError, match="a global batch of 1 does not divide"):
        cells("all", facts=replace(NO_CHAIN, no_tensor="has nothing to split"), devices=(2,), batch=1)


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_local_one() -> None:
    strong = cells("data", "gpipe", devices=(1, 2, 4), scaling="strong", batch=16)
    weak = cells("data", "gpipe", devices=(1, 2, 4), scaling="weak", batch=16)
    assert {cell.global_batch_size for cell in strong.cells} == {16}
    assert {(c.preset, c.num_devices): c.global_batch_size for c in weak.cells} == {
        ("single", 1): 16,
        ("data", 2): 32,
        ("gpipe", 2): 16,
        ("data", 4): 64,
        ("gpipe", 4): 16,
    }


def test_repeats_are_outermost() -> None:
    order = [(cell.preset, repeat) for cell, repeat in cells("data", "zero1", devices=(2,)).runs(2)]
    assert order == [("data", 0), ("zero1", 0), ("data", 1), ("zero1", 1)]


def test_run_names_are_safe_file_names_and_tell_runs_apart() -> None:
    found = cells("data=2,tensor=2", devices=(4,)).cells[0]
    assert found.name("some dir/my net.py:build", 1) == "my-net.py-build--data=2,tensor=2--d4--r1"
    assert safe_name("../..") == "model"

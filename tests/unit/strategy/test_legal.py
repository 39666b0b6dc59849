from __future__ import annotations

import pytest

from meshwise.errors import StrategyError
from meshwise.strategy import Strategy
from meshwise.strategy.legal import ModelFacts, check

GPT = ModelFacts(name="gpt2-tiny", num_layers=6, tensor_sizes=(("attention heads", 6), ("hidden units", 96)))
VGG = ModelFacts(
    name="vgg16-tiny",
    num_layers=16,
    no_tensor="has no column/row split; use data, zero or a pipeline",
    has_batch_norm=False,
)
INCEPTION = ModelFacts(name="inception_v3", no_pipeline="is no chain of layers; use data or zero", has_batch_norm=True)


def one_f_one_b(size: int, num_micro_batches: int = 4, **values: int) -> Strategy:
    return Strategy(pipeline_parallel_size=size, schedule="1f1b", num_micro_batches=num_micro_batches, **values)


@pytest.mark.parametrize(
    ("strategy", "facts", "global_batch_size"),
    [
        (Strategy(), GPT, 1),
        (Strategy(tensor_parallel_size=6), GPT, 3),
        (Strategy(tensor_parallel_size=3, data_parallel_size=2), GPT, 4),
        (one_f_one_b(6, num_micro_batches=8), GPT, 8),
        (one_f_one_b(4, data_parallel_size=2), VGG, 16),
        (Strategy(data_parallel_size=4, batch_norm="sync"), INCEPTION, 8),
    ],
    ids=str,
)
def test_what_fits_passes(strategy: Strategy, facts: ModelFacts, global_batch_size: int) -> None:
    check(strategy, facts, global_batch_size)


@pytest.mark.parametrize(
    ("strategy", "facts", "global_batch_size", "message"),
    [
        (
            one_f_one_b(2, data_parallel_size=2),
            GPT,
            20,
            "data=2,pipeline=2,schedule=1f1b,micro_batches=4: a global batch of 20 does not divide into data 2 × "
            "micro_batches 4 = 8; use a global batch of 16 or 24",
        ),
        (
            Strategy(data_parallel_size=8),
            GPT,
            3,
            "data=8: a global batch of 3 does not divide into data 8 × micro_batches 1 = 8; use a global batch of 8",
        ),
        (
            one_f_one_b(8, 8),
            GPT,
            8,
            "pipeline=8,schedule=1f1b,micro_batches=8: gpt2-tiny has 6 layers, fewer than the 8 stages asked for; use "
            "at most 6 stages",
        ),
        (
            Strategy(tensor_parallel_size=4),
            GPT,
            4,
            "tensor=4: gpt2-tiny has 6 attention heads, which tensor=4 does not divide; use tensor=3 or tensor=6",
        ),
        (
            Strategy(tensor_parallel_size=12),
            GPT,
            4,
            "tensor=12: gpt2-tiny has 6 attention heads, which tensor=12 does not divide; use tensor=6",
        ),
        (
            Strategy(tensor_parallel_size=2),
            VGG,
            4,
            "tensor=2: vgg16-tiny has no column/row split; use data, zero or a pipeline",
        ),
        (
            one_f_one_b(2),
            INCEPTION,
            8,
            "pipeline=2,schedule=1f1b,micro_batches=4: inception_v3 is no chain of layers; use data or zero",
        ),
        (Strategy(batch_norm="sync"), GPT, 4, "batch_norm=sync: gpt2-tiny has no batch norm; drop the key"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    strategy: Strategy, facts: ModelFacts, global_batch_size: int, message: str
) -> None:
    with pytest.raises(StrategyError) as caught:
        check(strategy, facts, global_batch_size)
    assert str(caught.value) == message


def test_stages_of_an_interleaved_pipeline_count_together() -> None:
    strategy = Strategy(pipeline_parallel_size=4, schedule="interleaved", num_virtual_stages=2, num_micro_batches=4)
    with pytest.raises(StrategyError, match="fewer than the 8 stages"):
        check(strategy, GPT, 4)


def test_an_asynchronous_pipeline_has_no_tensor_axis_and_no_clipping() -> None:
    stale = Strategy(pipeline_parallel_size=2, tensor_parallel_size=2, schedule="pipedream")
    with pytest.raises(StrategyError, match="use schedule=1f1b with the tensor axis"):
        check(stale, GPT, 4)
    with pytest.raises(StrategyError, match="use no clip norm, or schedule=1f1b"):
        check(Strategy(pipeline_parallel_size=2, schedule="pipedream"), GPT, 4, clip_norm=1.0)

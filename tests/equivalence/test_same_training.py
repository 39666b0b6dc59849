"""Every synchronous strategy gives the losses and the parameters of one process, in float64, step after step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from harness import spawn

from meshwise.strategy import parse

STEPS = 10
TOLERANCE = 1e-12
"""Relative, as promised to users. Measured worst case: see docs/equivalence.md."""

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
}

TWO = ["data", "zero1", "zero2", "zero3", "tensor", "gpipe", "1f1b", "interleaved", "data,micro_batches=2"]
FOUR = [
    "data", "zero1", "zero2", "zero3", "tensor", "gpipe", "1f1b",
    "data=2,tensor=2", "data=2,pipeline=2", "zero=3,data=2,tensor=2",
    "zero=1,data=2,tensor=2", "zero=2,data=2,tensor=2",
    "data=2,pipeline=2,schedule=interleaved", "zero=1,data=2,pipeline=2", "zero=2,data=2,pipeline=2",
    "zero=3,data=2,pipeline=2", "tensor=2,pipeline=2,schedule=gpipe",
]  # fmt: skip
EIGHT = ["data=2,tensor=2,pipeline=2", "zero=1,data=2,tensor=2,pipeline=2"]
VARIANTS = [
    "1f1b,checkpointing=full",
    "zero3,checkpointing=selective",
    "tensor,checkpointing=full",
    "zero2,micro_batches=4",
]


def worst_difference(rank: int, model: str, text: str, clip_norm: float, optimizer: str) -> float | None:
    from meshwise.run.apply import parallelize
    from meshwise.run.reference import Recipe, train_reference

    strategy = parse(text).at(torch.distributed.get_world_size())
    assert strategy is not None
    batch_size = 16
    data = models.batches(model, STEPS, batch_size)
    recipe = Recipe(
        strategy=strategy, loss=models.loss, optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm, example=data[0][0]
    )
    module = build(model)
    executor = parallelize(
        module, strategy, loss=models.loss, optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm, example=data[0][0]
    )
    own = executor.groups.index("data")
    losses: list[float] = []
    for inputs, targets in data:
        replicas = strategy.data_parallel_size
        result = executor.step(inputs.chunk(replicas)[own], targets.chunk(replicas)[own])
        losses.append(float(result.loss) if result.loss is not None else float("nan"))
    executor.flush()
    state = executor.state()
    everyone: list[list[float]] = [[] for _ in range(strategy.num_devices)]
    torch.distributed.all_gather_object(everyone, losses)
    if rank != 0:
        return None
    reference = train_reference(build(model), data, recipe)
    holders = [row for row in everyone if row[0] == row[0]]
    mean = torch.tensor(holders, dtype=torch.float64).mean(0)
    worst = relative(mean, torch.tensor(reference.losses, dtype=torch.float64))
    worst = max(
        worst, *(relative(state[name], reference.parameters[name]) for name in reference.parameters if name in state)
    )
    missing = set(reference.parameters) - set(state) - set().union(*reference.tied)
    assert not missing, f"{sorted(missing)} not in {sorted(state)}"
    return worst


def build(model: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.MODELS[model]().double()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest entry: what rounding is relative to in a sum."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def check(model: str, text: str, num_ranks: int, *, clip_norm: float = 0.0, optimizer: str = "momentum") -> None:
    worst = spawn(worst_difference, num_ranks, model, text, clip_norm, optimizer)[0]
    assert worst <= TOLERANCE, f"{text} on {num_ranks} ranks: {worst:.2e}"


@pytest.mark.parametrize("model", ["gpt2", "cnn"])
@pytest.mark.parametrize("text", TWO)
def test_two_processes_train_as_one(model: str, text: str) -> None:
    check(model, text, 2, clip_norm=0.5)
    check(model, text, 2, optimizer="adam")


@pytest.mark.parametrize("model", ["gpt2", "cnn"])
@pytest.mark.parametrize("text", FOUR)
def test_four_processes_train_as_one(model: str, text: str) -> None:
    check(model, text, 4, clip_norm=0.5, optimizer="adam")


@pytest.mark.parametrize("text", EIGHT)
def test_three_axes_train_as_one(text: str) -> None:
    check("gpt2", text, 8, clip_norm=0.5)


@pytest.mark.parametrize("text", VARIANTS)
def test_recomputing_and_accumulating_change_nothing(text: str) -> None:
    check("gpt2", text, 2, clip_norm=0.5)


@pytest.mark.parametrize("text", ["data,batch_norm=sync", "zero1,batch_norm=sync", "zero3,batch_norm=sync"])
def test_synchronised_batch_norm_sees_the_whole_batch(text: str) -> None:
    check("cnn", text, 2, clip_norm=0.5)


@pytest.mark.parametrize("text", ["tensor", "1f1b", "zero3"])
def test_a_residual_network_trains_as_one(text: str) -> None:
    check("resnet", text, 2)


@pytest.mark.parametrize("model", ["gpt2", "cnn"])
@pytest.mark.parametrize("text", ["pipedream", "pipedream-vsync", "pipedream-2bw"])
def test_stale_weights_are_the_papers(model: str, text: str) -> None:
    worst = spawn(worst_difference, 2, model, text, 0.0, "momentum")[0]
    assert worst == 0.0


@pytest.mark.parametrize("text", ["pipedream", "pipedream-vsync", "pipedream-2bw"])
def test_stale_weights_stay_tied_on_four_processes(text: str) -> None:
    worst = spawn(worst_difference, 4, "gpt2", text, 0.0, "momentum")[0]
    assert worst == 0.0


def test_replicas_of_stale_pipelines_train_as_one() -> None:
    check("gpt2", "data=2,pipeline=2,schedule=pipedream", 4)
    check("gpt2", "data=2,pipeline=2,schedule=pipedream-2bw", 4)

"""Memory of a step against sums one can do by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from meshwise.measure.memory import Allocation, Range, analyse
from meshwise.measure.profile import memory_of, profiled

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Held:
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    weight_versions: int = 1


def allocation(time: float, nbytes: int, address: int) -> Allocation:
    return Allocation(time=time, nbytes=nbytes, address=address)


PHASES = [
    Range(label="forward", start=0, end=10),
    Range(label="backward", start=10, end=20),
    Range(label="update", start=20, end=30),
]


def test_parts_are_told_apart_by_phase_and_lifetime():
    found = analyse(
        [
            allocation(1, 100, 1),  # an activation
            allocation(11, 40, 2),  # a gradient: lives until the update
            allocation(12, 7, 3),  # a temporary of backward
            allocation(13, -7, 3),
            allocation(14, -100, 1),
            allocation(21, 5, 4),  # a temporary of the update
            allocation(22, -5, 4),
            allocation(23, -40, 2),
        ],
        PHASES,
        held=Held(parameters=40, gradients=40, optimizer_state=80),
    )
    assert (found.peak, found.phase) == (40 + 80 + 100 + 40 + 7, "backward")
    assert (found.activations, found.gradients, found.other) == (100, 40, 7)
    assert (found.parameters, found.optimizer_state, found.held_gradients) == (40, 80, 40)


def test_gradient_buffers_that_were_there_before_count_from_the_start():
    found = analyse([allocation(1, 100, 1), allocation(15, -100, 1)], PHASES, held=Held(parameters=40, gradients=40))
    assert (found.peak, found.gradients) == (40 + 40 + 100, 40)


def test_an_address_used_again_is_another_block():
    events = [allocation(1, 100, 1), allocation(2, -100, 1), allocation(3, 30, 1), allocation(4, 30, 2)]
    found = analyse(events, PHASES, held=Held())
    assert found.peak == 100


def test_gathered_parameters_are_not_activations():
    ranges = [*PHASES, Range(label="sharded", start=2, end=3)]
    found = analyse([allocation(2.5, 64, 1), allocation(4, 16, 2)], ranges, held=Held())
    assert (found.activations, found.other, found.phase) == (16, 64, "forward")


def test_older_weight_versions_are_what_the_executor_says_it_holds():
    ranges = [*PHASES, Range(label="stash", start=24, end=25)]
    found = analyse(
        [allocation(1, 10, 1), allocation(24.5, 40, 2)], ranges, held=Held(parameters=80, weight_versions=2)
    )
    assert (found.peak, found.parameters, found.weight_versions) == (90, 80, 2)


def test_an_allocator_that_counts_is_believed():
    events = [allocation(1, 100, 1), allocation(11, -8, 99)]
    found = analyse(events, PHASES, held=Held(parameters=40), allocated_before=60)
    assert (found.peak, found.other) == (160, 20)


def test_without_named_phases_forward_is_what_is_left():
    found = analyse([allocation(1, 8, 1)], [Range(label="backward", start=10, end=20)], held=Held())
    assert (found.phase, found.activations) == ("forward", 8)


def test_a_real_tensor_of_known_size_is_seen():
    def step() -> None:
        with record_function("meshwise.forward"):
            kept = torch.empty(1000, 1000)
            del kept

    found = memory_of(profiled(step, device=CPU), device=CPU, held=Held(parameters=7), before=None)
    assert (found.peak, found.activations, found.phase) == (4_000_000 + 7, 4_000_000, "forward")


@pytest.mark.parametrize("named", [True, False])
def test_one_linear_layer_with_adam_is_the_textbook(named):
    """4Ψ parameters, 4Ψ gradients, 8Ψ Adam state; the input is the only activation a linear layer keeps."""
    layer = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    inputs = torch.randn(64, 512)
    psi = layer.weight.numel()

    def step() -> None:
        for name, action in (("forward", forward), ("backward", backward), ("update", optimizer.step)):
            if named:
                with record_function(f"meshwise.{name}"):
                    action()
            else:
                action()

    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(layer(inputs * 2).sum())

    def backward() -> None:
        losses.pop().backward()

    step()
    optimizer.zero_grad(set_to_none=True)
    state = sum(value.numel() * value.element_size() for one in optimizer.state.values() for value in one.values())
    assert state == 8 * psi + 4
    held = Held(parameters=4 * psi, gradients=4 * psi, optimizer_state=state)
    found = memory_of(profiled(step, device=CPU), device=CPU, held=held, before=None)
    assert found.phase == "update"
    assert found.gradients == 4 * psi
    assert found.peak >= 16 * psi
    assert found.peak == found.parameters + found.gradients + found.optimizer_state + found.activations + found.other
    assert found.other == pytest.approx(2 * 4 * psi, abs=64)  # Adam's denominator and its root, and some scalars


def test_activations_peak_where_backward_begins():
    """Eight layers keep their input each; the peak is all of them and little else."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    inputs = torch.randn(4096, 64)

    def step() -> None:
        with record_function("meshwise.forward"):
            loss = layers(inputs).sum()
        with record_function("meshwise.backward"):
            loss.backward()

    parameters = 8 * 64 * 64 * 4
    held = Held(parameters=parameters, gradients=parameters)
    found = memory_of(profiled(step, device=CPU), device=CPU, held=held, before=None)
    one = 4096 * 64 * 4
    assert found.activations == pytest.approx(7 * one, abs=one)  # inputs of layers 2 to 8; sum() keeps a shape only
    assert found.phase == "backward"
    assert found.peak == found.parameters + found.gradients + found.optimizer_state + found.activations + found.other

"""Memory of one training step, from the profiler's list of allocations: how much, when most, and what for.

    held between steps:  parameters ┃ optimizer state ┃ persistent gradient buffers
    + what the step allocates, by the phase in which it was allocated:
        forward                                    activations
        backward, still alive when the update begins   gradients
        anything else (temporaries, communication buffers, gathered shards)   other

The profiler sees allocations and their end, not what existed before; ``Held`` supplies that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwise.record import RankMemory

PREFIX = "meshwise."
"""Ranges named ``meshwise.forward``, ``.backward``, ``.update`` mark phases; ``meshwise.stash`` weight versions."""

PHASES = ("forward", "backward", "update")

_LABELS = {
    "autograd::engine::evaluate_function": "backward",
    "Optimizer.step#": "update",
    "FSDP::post_backward": "backward",
    "FSDP::root_post_backward": "backward",
    "FSDP::all_gather": "sharded",
    "FSDP::pre_": "sharded",
    "FSDP::forward_prefetch": "sharded",
    "FSDP::backward_prefetch": "sharded",
    "FSDP::root_pre_forward": "sharded",
}
"""What torch's own ranges mean, by the start of their name; ``sharded``: parameters gathered for a moment."""


class HeldBytes(Protocol):
    """What a rank holds between steps (``meshwise.run.executor.Held``)."""

    @property
    def parameters(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def optimizer_state(self) -> int: ...
    @property
    def weight_versions(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """``nbytes`` > 0 allocated, < 0 freed, at ``address``; ``time`` in any unit, the same as the ranges'."""

    time: float
    nbytes: int
    address: int


@dataclass(frozen=True, kw_only=True)
class Range:
    """A labelled stretch of the step: ``forward``, ``backward``, ``update``, ``stash`` or ``sharded``."""

    label: str
    start: float
    end: float


@dataclass(kw_only=True, eq=False)
class _Block:
    nbytes: int
    label: str
    start: float
    end: float = float("inf")


@dataclass(kw_only=True)
class _Peak:
    """The running sum of allocations at its largest."""

    nbytes: int = 0
    time: float = float("-inf")
    phase: str = "step"


@dataclass
class _Ranges:
    """Finds the innermost range around rising times. Ranges of several threads may overlap without nesting."""

    ranges: Sequence[Range]
    _active: list[Range] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        self.ranges = sorted(self.ranges, key=lambda item: item.start)
        self._named = any(item.label == "forward" for item in self.ranges)

    def labels(self, time: float) -> tuple[str, str]:
        """(label of the innermost range, phase of the step) at ``time``."""
        while self._next < len(self.ranges) and self.ranges[self._next].start <= time:
            self._active.append(self.ranges[self._next])
            self._next += 1
        self._active = [item for item in self._active if item.end >= time]
        phases = [item.label for item in self._active if item.label in PHASES]
        # Without ranges around the forward, forward is what lies outside of backward and update.
        phase = phases[-1] if phases else "step" if self._named else "forward"
        return (self._active[-1].label if self._active else phase), phase


def analyse(
    allocations: Sequence[Allocation], ranges: Sequence[Range], *, held: HeldBytes, allocated_before: int | None = None
) -> RankMemory:
    """Peak of one step and what it consists of; the parts add up to the peak.

    Args:
        allocations: of the step, in order of time, on one device.
        ranges: what was going on when.
        held: what existed before (its gradients: as they are at the end of backward).
        allocated_before: bytes the allocator had given out when the step began, where it can tell (CUDA); what
            exceeds ``held`` counts as other. None takes ``held`` for all there was.
    """
    blocks, peak = _follow(allocations, ranges, sees_all=allocated_before is not None)
    updates = sorted(item.start for item in ranges if item.label == "update")
    gradients = {block for block in blocks if block.label == "backward" and block.end >= _next_update(block, updates)}
    first_update = updates[0] if updates else float("inf")
    fresh = sum(block.nbytes for block in gradients if block.start < first_update)
    persistent = max(0, held.gradients - fresh)
    live = [block for block in blocks if block.start <= peak.time < block.end]
    live_gradients = sum(block.nbytes for block in live if block in gradients)
    activations = sum(block.nbytes for block in live if block.label == "forward")
    base = held.parameters + held.optimizer_state + persistent
    total = (base if allocated_before is None else max(base, allocated_before)) + peak.nbytes
    return RankMemory(
        peak=total,
        phase=peak.phase,
        parameters=held.parameters,
        gradients=persistent + live_gradients,
        held_gradients=held.gradients,
        optimizer_state=held.optimizer_state,
        activations=activations,
        other=total - base - live_gradients - activations,
        weight_versions=held.weight_versions,
    )


def _follow(
    allocations: Sequence[Allocation], ranges: Sequence[Range], *, sees_all: bool
) -> tuple[list[_Block], _Peak]:
    """Every block the step allocated, and the instant when memory was fullest.

    ``sees_all``: the end of blocks older than the step is in the list too (CUDA's allocator; the CPU's is silent).
    """
    finder, blocks, live, peak = _Ranges(ranges), [], {}, _Peak()
    running = 0
    for event in allocations:
        label, phase = finder.labels(event.time)
        if event.nbytes > 0:
            if label == "stash" and not sees_all:
                continue  # older weight versions are part of what the executor says it holds
            live[event.address] = block = _Block(nbytes=event.nbytes, label=label, start=event.time)
            blocks.append(block)
            running += event.nbytes
            if running > peak.nbytes:
                peak = _Peak(nbytes=running, time=event.time, phase=phase)
        elif event.address in live:
            block = live.pop(event.address)
            block.end = event.time
            running -= block.nbytes
        elif sees_all:
            running += event.nbytes
    return blocks, peak


def _next_update(block: _Block, updates: Sequence[float]) -> float:
    """When the first update after the block's allocation begins; a step without one never ends."""
    index = bisect_left(updates, block.start)
    return updates[index] if index < len(updates) else float("inf")


def from_trace(events: Sequence[dict[str, Any]], *, device_index: int = -1) -> tuple[list[Allocation], list[Range]]:
    """Allocations and ranges of a profiler's Chrome trace; ``device_index`` -1 is the CPU, else a CUDA device."""
    allocations = [
        Allocation(time=event["ts"], nbytes=event["args"]["Bytes"], address=event["args"]["Addr"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Id"] == device_index
    ]
    ranges = [
        Range(label=label, start=event["ts"], end=event["ts"] + event.get("dur", 0.0))
        for event in events
        if event.get("ph") == "X" and (label := _label(event["name"]))
    ]
    return sorted(allocations, key=lambda item: item.time), ranges


def _label(name: str) -> str:
    own = name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
    if own in (*PHASES, "stash"):
        return own
    return next((label for start, label in _LABELS.items() if name.startswith(start)), "")

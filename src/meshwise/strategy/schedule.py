"""Pipeline schedules as values: for every device, the tuple of actions it performs in one step.

What is priced and what is executed is the same object. F0 = forward of micro-batch 0, B0 = its backward, U = update:

    gpipe, 2 stages, 3 micro-batches            1f1b                                    pipedream (no flush)
    s0  F0 F1 F2 .. .. .. B0 B1 B2 U            s0  F0 F1 .. B0 F2 B1 .. B2 U           s0  F0 F1 B0 U F2 B1 U F3 …
    s1  .. F0 F1 F2 B0 B1 B2 U                  s1  .. F0 B0 F1 B1 F2 B2 U              s1  .. F0 B0 U F1 B1 U F2 …
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.strategy.strategy import Strategy


@dataclass(frozen=True)
class Action:
    """``kind`` is ``forward``, ``backward`` or ``update``; ``micro_batch`` counts from 0 (for an update: steps)."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step of a pipeline. ``devices[d]`` is what device ``d`` does, in order.

    For the asynchronous schedules, where a step has no end of its own, the step shown holds ``num_micro_batches``
    micro-batches from a cold start to a drained pipeline.
    """

    name: str
    num_devices: int
    num_virtual_stages: int
    num_micro_batches: int
    devices: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return self.num_devices * self.num_virtual_stages

    def live_micro_batches(self, device: int) -> int:
        """Most micro-batches whose activations ``device`` holds at once (per stage it holds, summed)."""
        live = peak = 0
        for action in self.devices[device]:
            live += {"forward": 1, "backward": -1}.get(action.kind, 0)
            peak = max(peak, live)
        return peak

    @property
    def bubble_fraction(self) -> float:
        """Idle share of a flushed step with equal stages and instant links: ``(n-1)/(v·m+n-1)`` [Narayanan 2021]."""
        idle = self.num_devices - 1
        return idle / (self.num_virtual_stages * self.num_micro_batches + idle)


def schedule_for(strategy: Strategy, *, num_micro_batches: int | None = None) -> Schedule:
    """The schedule of one step of ``strategy``; ``num_micro_batches`` replaces the strategy's own number."""
    size, virtual = strategy.pipeline_parallel_size, strategy.num_virtual_stages
    micro_batches = num_micro_batches or strategy.num_micro_batches
    if strategy.schedule == "gpipe":
        devices = [_gpipe(stage, micro_batches) for stage in range(size)]
    elif strategy.schedule == "1f1b":
        devices = [_one_f_one_b(stage, size, micro_batches) for stage in range(size)]
    elif strategy.schedule == "interleaved":
        devices = [_interleaved(device, size, virtual, micro_batches) for device in range(size)]
    elif strategy.asynchronous:
        per_update = micro_batches_per_update(strategy)
        devices = [_pipedream(stage, size, micro_batches, per_update) for stage in range(size)]
    else:
        devices = [_accumulate(micro_batches)]
    return Schedule(
        name=strategy.schedule,
        num_devices=len(devices),
        num_virtual_stages=virtual,
        num_micro_batches=micro_batches,
        devices=tuple(map(tuple, devices)),
    )


def warm_up_forwards(stage: int, num_stages: int) -> int:
    """Forwards a stage runs before its first backward in any one-forward-one-backward order: ``n-1-s``."""
    return num_stages - 1 - stage


def micro_batches_per_update(strategy: Strategy) -> int:
    """Backwards between two updates of an asynchronous schedule: a step's micro-batches for 2BW, else one."""
    return strategy.num_micro_batches if strategy.schedule == "pipedream-2bw" else 1


def weight_versions(strategy: Strategy, stage: int) -> int:
    """Most weight versions alive on ``stage`` [Narayanan 2019, section 3.3; 2021, section 3.1]."""
    if strategy.schedule == "pipedream":
        return strategy.num_stages - stage
    if strategy.schedule == "pipedream-vsync":
        return strategy.num_stages
    return 2 if strategy.schedule == "pipedream-2bw" else 1


def forward_version(strategy: Strategy, stage: int, micro_batch: int) -> int:
    """Updates the weights have seen with which ``stage`` runs forward *and* backward of ``micro_batch``.

    Stashing: ``max(0, b-(n-1-s))``; vertical sync: ``max(0, b-(n-1))``; 2BW: batch ``k`` uses ``max(0, k-1)``.
    """
    last = strategy.num_stages - 1
    if strategy.schedule == "pipedream":
        return max(0, micro_batch - (last - stage))
    if strategy.schedule == "pipedream-vsync":
        return max(0, micro_batch - last)
    batch = micro_batch // strategy.num_micro_batches
    return max(0, batch - 1) if strategy.schedule == "pipedream-2bw" else batch


def _accumulate(micro_batches: int) -> list[Action]:
    actions = []
    for index in range(micro_batches):
        actions += [Action("forward", 0, index), Action("backward", 0, index)]
    return [*actions, Action("update", 0, 0)]


def _gpipe(stage: int, micro_batches: int) -> list[Action]:
    forwards = [Action("forward", stage, index) for index in range(micro_batches)]
    backwards = [Action("backward", stage, index) for index in range(micro_batches)]
    return [*forwards, *backwards, Action("update", stage, 0)]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """``warm_up`` forwards, then one forward and one backward in turn, then the backwards left."""
    warm_up = min(warm_up, len(forwards))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm_up :]


def _one_f_one_b(stage: int, num_stages: int, micro_batches: int) -> list[Action]:
    *work, update = _gpipe(stage, micro_batches)
    forwards, backwards = work[:micro_batches], work[micro_batches:]
    return [*_alternate(forwards, backwards, warm_up_forwards(stage, num_stages)), update]


def _interleaved(device: int, num_devices: int, virtual: int, micro_batches: int) -> list[Action]:
    """Micro-batches go in rounds of ``num_devices`` through a device's stages ``device + k·num_devices``."""
    stages = [device + index * num_devices for index in range(virtual)]
    rounds = [range(start, start + num_devices) for start in range(0, micro_batches, num_devices)]
    forwards = [Action("forward", stage, index) for turn in rounds for stage in stages for index in turn]
    backwards = [Action("backward", stage, index) for turn in rounds for stage in reversed(stages) for index in turn]
    warm_up = (virtual - 1) * num_devices + 2 * (num_devices - 1 - device)
    updates = [Action("update", stage, 0) for stage in stages]
    return [*_alternate(forwards, backwards, warm_up), *updates]


def _pipedream(stage: int, num_stages: int, micro_batches: int, per_update: int) -> list[Action]:
    *work, _ = _one_f_one_b(stage, num_stages, micro_batches)
    actions: list[Action] = []
    for action in work:
        actions.append(action)
        if action.kind == "backward" and (action.micro_batch + 1) % per_update == 0:
            actions.append(Action("update", stage, action.micro_batch // per_update))
    return actions

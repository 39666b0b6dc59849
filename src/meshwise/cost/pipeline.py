"""Playing a schedule: when each action of a pipeline runs, from the time each takes. The same object is executed.

device 0  F0 F1 F2 F3 ·· ·· B0 B1 ...        an action starts when its device is free and what it needs has arrived:
device 1     F0 F1 B0 F2 B1 ...              a forward the activation of the stage before, a backward the gradient of
                                             the stage after; an update nothing but its place in the order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.errors import StrategyError
from meshwise.strategy.schedule import Action, Schedule
from meshwise.units import Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Seconds of one micro-batch on one stage, and of its update (which the asynchronous schedules make often)."""

    forward: Seconds
    backward: Seconds
    update: Seconds = 0.0

    def of(self, action: Action) -> Seconds:
        return {"forward": self.forward, "backward": self.backward, "update": self.update}[action.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One action with its place in time."""

    action: Action
    start: Seconds
    stop: Seconds


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A played step. ``devices[d]`` lists what device ``d`` did, in order."""

    devices: tuple[tuple[Played, ...], ...]

    @property
    def makespan(self) -> Seconds:
        return max(device[-1].stop for device in self.devices if device)

    def busy(self, device: int) -> Seconds:
        return sum(played.stop - played.start for played in self.devices[device])

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all devices' time until the last one ends."""
        total = len(self.devices) * self.makespan
        return 1 - sum(self.busy(device) for device in range(len(self.devices))) / total if total else 0.0


def play(schedule: Schedule, stages: Sequence[StageTime], *, send_time: Seconds = 0.0) -> Timeline:
    """When each action of ``schedule`` runs; ``stages[s]`` are the times of stage ``s``, ``send_time`` one hop's.

    A message leaves at once, costs no device time and arrives ``send_time`` later; a hop within a device is free.

    Raises:
        StrategyError: another number of stages than the schedule's, or an order in which every device waits.
    """
    if len(stages) != schedule.num_stages:
        raise StrategyError(
            f"{len(stages)} stage times for a schedule of {schedule.num_stages} stages; give one for each stage"
        )
    device_of = {action.stage: index for index, actions in enumerate(schedule.devices) for action in actions}
    played: list[list[Played]] = [[] for _ in schedule.devices]
    done: dict[tuple[str, int, int], Seconds] = {}
    free = [0.0] * len(schedule.devices)
    waiting = [index for index, actions in enumerate(schedule.devices) if actions]
    while waiting:
        progress = False
        for device in waiting:
            actions = schedule.devices[device]
            while len(played[device]) < len(actions):
                action = actions[len(played[device])]
                ready = _arrival(action, done, device_of, schedule.num_stages, send_time)
                if ready is None:
                    break
                start = max(free[device], ready)
                free[device] = start + stages[action.stage].of(action)
                played[device].append(Played(action=action, start=start, stop=free[device]))
                done[action.kind, action.stage, action.micro_batch] = free[device]
                progress = True
        if not progress:
            stuck = schedule.devices[waiting[0]][len(played[waiting[0]])]
            raise StrategyError(f"the schedule {schedule.name} never ends: {stuck} waits for what comes after it")
        waiting = [index for index in waiting if len(played[index]) < len(schedule.devices[index])]
    return Timeline(devices=tuple(map(tuple, played)))


def _arrival(
    action: Action,
    done: dict[tuple[str, int, int], Seconds],
    device_of: dict[int, int],
    num_stages: int,
    send_time: Seconds,
) -> Seconds | None:
    """When what ``action`` needs from another stage is there; None while its maker has not run."""
    if action.kind == "update":
        return 0.0
    source = action.stage + (-1 if action.kind == "forward" else 1)
    if not 0 <= source < num_stages:
        # The first stage reads the data; the last one's backward follows its own forward.
        return 0.0 if action.kind == "forward" else done.get(("forward", action.stage, action.micro_batch))
    made = done.get((action.kind, source, action.micro_batch))
    if made is None:
        return None
    return made + (send_time if device_of[source] != device_of[action.stage] else 0.0)


def steady_time(stages: Sequence[StageTime], *, send_time: Seconds = 0.0) -> Seconds:
    """Seconds between two micro-batches of a one-forward-one-backward pipeline that never drains.

    ``max over stages i ≤ j of (Σ_i..j work + 2(j-i) hops) / (j-i+1)``: between two stages of such an order there are as
    many micro-batches under way as stages, and each must come back before the next may leave. (The largest cycle
    ratio of the order's dependencies; held to played schedules by a test.) With instant hops: the slowest stage.
    """
    work = [stage.forward + stage.backward + stage.update for stage in stages]
    slowest = 0.0
    for first in range(len(work)):
        total = 0.0
        for last in range(first, len(work)):
            total += work[last]
            slowest = max(slowest, (total + 2 * (last - first) * send_time) / (last - first + 1))
    return slowest

"""Adds up what the ranks wrote to one ``Record``. Pure: no processes, no clock.

A step takes as long as its slowest rank. Losses are means over the replicas that report them, which all have equally
many samples. What no rank measured stays unknown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.record import CurvePoint, RankMemory, Record, Status
from meshwise.run.job import Job
from meshwise.run.rank_files import Event, last_event


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the run ended, as the launcher saw it."""

    status: Status = "ok"
    reason: str = ""
    wall_time: float | None = None


def assemble(job: Job, events: Mapping[int, list[Event]], ending: Ending) -> Record:
    """The record of a run from its events by rank; whatever was measured is in it, however the run ended."""
    plan = _plan(events)
    steps = _steps(events)
    times = [step.seconds for step in steps[_num_untimed(job, plan, len(steps)) :]]
    step_time = statistics.median(times) if times else None
    curve = _curve(events, steps, plan)
    samples_per_second = job.global_batch_size / step_time if step_time else None
    diverged = [event["step"] for rank in events.values() if (event := last_event(rank, "diverged"))]
    status, reason = ending.status, ending.reason
    if diverged and status == "ok":
        status, reason = (
            "diverged",
            f"the loss was no finite number from step {min(diverged)} on; lower the learning rate",
        )
    return Record(
        **_asked(job),
        status=status,
        reason=reason,
        num_steps=len(steps),
        steps_per_epoch=plan.get("steps_per_epoch"),
        parameters=plan.get("parameters"),
        step_time=step_time,
        step_times=times,
        epoch_time=_epoch_time(job, steps, plan, step_time),
        throughput=samples_per_second * plan.get("units_per_sample", 1) if samples_per_second else None,
        throughput_unit=plan.get("unit", "samples"),
        **_memory(events),
        communication=_communication(events),
        validation=_last_validation(curve),
        curve=curve,
        train_losses=[step.loss for step in steps],
        target_metric=f"{job.target[0]} {job.target[1]:g}" if job.target else None,
        time_to_target=_time_to_target(job, curve),
        wall_time=ending.wall_time,
        trace="trace.json" if (job.folder / "trace.json").exists() else None,
        folder=job.folder.name,
    )


def reached(target: tuple[str, float], point: Mapping[str, Any]) -> bool:
    """Whether ``point`` (``validation_loss``, ``perplexity`` or ``accuracy`` by name) meets the target."""
    name, value = target
    found = point.get(name)
    if found is None:
        return False
    return bool(found >= value if name == "accuracy" else found <= value)


@dataclass(frozen=True, kw_only=True)
class _Step:
    number: int
    seconds: float
    loss: float | None


def _asked(job: Job) -> dict[str, Any]:
    strategy = job.strategy
    updates = strategy.num_micro_batches if strategy.schedule in ("pipedream", "pipedream-vsync") else 1
    return {
        "model": job.model,
        "data": job.data,
        "strategy": strategy.text,
        "preset": job.preset,
        "num_devices": strategy.num_devices,
        "repeat": job.repeat,
        "seed": job.seed,
        "scaling": job.scaling,
        "precision": strategy.precision,
        "global_batch_size": job.global_batch_size,
        "micro_batch_size": strategy.micro_batch_size(job.global_batch_size) or None,
        "updates_per_step": updates,
    }


def _plan(events: Mapping[int, list[Event]]) -> Event:
    return next((event for _, rank in sorted(events.items()) if (event := last_event(rank, "plan"))), {})


def _steps(events: Mapping[int, list[Event]]) -> list[_Step]:
    """Steps that every rank has finished, in order."""
    by_rank = [{event["step"]: event for event in rank if event["event"] == "step"} for rank in events.values()]
    if not by_rank:
        return []
    steps = []
    for number in sorted(set.intersection(*map(set, by_rank))):
        found = [rank[number] for rank in by_rank]
        losses = [event["loss"] for event in found if event["has_loss"]]
        known = bool(losses) and all(loss is not None for loss in losses)
        steps.append(
            _Step(
                number=number,
                seconds=max(event["seconds"] for event in found),
                loss=statistics.fmean(losses) if known else None,
            )
        )
    return steps


def _num_untimed(job: Job, plan: Event, num_steps: int) -> int:
    """Warm-up steps to leave out; one of the steps asked for is always timed, unless the run ended before it."""
    return min(job.untimed_steps, max(0, plan.get("num_steps", num_steps) - 1))


def _epoch_time(job: Job, steps: list[_Step], plan: Event, step_time: float | None) -> float | None:
    """Mean timed step of an epoch that ran whole × its steps, median over such epochs; else from the median step."""
    size = plan.get("steps_per_epoch")
    if not size or step_time is None:
        return None
    untimed = _num_untimed(job, plan, len(steps))
    whole = [steps[start : start + size] for start in range(0, len(steps) - size + 1, size)]
    timed = [[step.seconds for step in epoch if step.number > untimed] for epoch in whole]
    means = [statistics.fmean(times) * size for times in timed if times]
    return statistics.median(means) if means else step_time * size


def _curve(events: Mapping[int, list[Event]], steps: list[_Step], plan: Event) -> list[CurvePoint]:
    """Validations in order, with the mean training loss since the one before; a point without a finite loss ends it."""
    found: dict[int, list[Event]] = {}
    for rank in events.values():
        for event in rank:
            if event["event"] == "validation":
                found.setdefault(event["step"], []).append(event)
    curve, before = [], 0
    for number in sorted(found):
        event = found[number][0]
        if event["loss"] is None:
            break
        losses = [step.loss for step in steps if before < step.number <= number]
        finite = [loss for loss in losses if loss is not None]
        curve.append(
            CurvePoint(
                step=number,
                epoch=number / plan["steps_per_epoch"],
                time=max(one["training_time"] for one in found[number]),
                train_loss=statistics.fmean(finite) if finite else None,
                validation_loss=event["loss"],
                perplexity=event.get("perplexity"),
                accuracy=event.get("accuracy"),
            )
        )
        before = number
    return curve


def _last_validation(curve: list[CurvePoint]) -> dict[str, float]:
    if not curve:
        return {}
    last = curve[-1]
    values = {"validation_loss": last.validation_loss, "perplexity": last.perplexity, "accuracy": last.accuracy}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _time_to_target(job: Job, curve: list[CurvePoint]) -> float | None:
    target = job.target
    if target is None:
        return None
    return next((point.time for point in curve if reached(target, point.model_dump())), None)


def _memory(events: Mapping[int, list[Event]]) -> dict[str, Any]:
    found = [last_event(rank, "memory") for _, rank in sorted(events.items())]
    if not found or any(event is None for event in found):
        return {}
    memory = [RankMemory.model_validate(event["memory"]) for event in found if event is not None]
    return {"memory": memory, "peak_memory": [one.peak for one in memory]}


def _communication(events: Mapping[int, list[Event]]) -> dict[str, float]:
    """Bytes by kind, mean over ranks. What is received was counted where it was sent."""
    found = [last_event(rank, "communication") for rank in events.values()]
    if not found or any(event is None for event in found):
        return {}
    totals: dict[str, float] = {}
    for event in found:
        for kind, nbytes in (event or {})["bytes"].items():
            totals[kind] = totals.get(kind, 0.0) + nbytes
    totals.pop("recv", None)
    return {kind: total / len(found) for kind, total in sorted(totals.items())}

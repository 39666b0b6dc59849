"""Record: one training under one strategy, predicted or measured, with the same fields. JSON lines on disk.

All values are in base units (s, B, samples). A quantity that is not known is ``None``; it is never zero.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

SCHEMA_VERSION = 1

Status = Literal["ok", "failed", "diverged", "refused", "interrupted"]


class CurvePoint(BaseModel):
    """One validation during training. ``time`` is seconds of training, evaluation left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    epoch: float
    time: float
    train_loss: float | None = None
    validation_loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None


class RankMemory(BaseModel):
    """Bytes of one rank at the instant of its peak within a training step.

    The parts add up to the peak: ``parameters`` and ``optimizer_state`` are what is held between steps, ``gradients``,
    ``activations`` and ``other`` what is live at that instant, by the phase that allocated it. At the height of a deep
    model's activations few gradients exist yet; ``held_gradients`` is what they come to at the end of backward.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    peak: int
    phase: str
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    other: int
    held_gradients: int = 0
    weight_versions: int = 1


class Record(BaseModel):
    """One run (or its prediction).

    Attributes:
        strategy: canonical text of the resolved strategy; ``preset`` the text it was asked by.
        step_time: median seconds of a step after warm-up (slowest rank); ``step_times`` all of them.
        epoch_time: seconds of training one pass over the training set (measured where a whole one ran, else
            ``step_time × steps_per_epoch``); evaluation left out.
        throughput: ``throughput_unit`` per second, all devices together.
        communication: kind → payload bytes a step, mean over ranks: what a rank hands to an all_reduce,
            reduce_scatter, broadcast or send, and what it receives from an all_gather.
        time_to_target: training seconds until the target metric was first reached; None if it was not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    kind: Literal["measured", "predicted"] = "measured"
    model: str
    data: str
    strategy: str
    preset: str
    num_devices: int
    repeat: int = 0
    seed: int = 0
    scaling: str = "strong"
    status: Status = "ok"
    reason: str = ""
    precision: str = "fp32"
    global_batch_size: int
    micro_batch_size: int | None = None
    num_steps: int = 0
    steps_per_epoch: int | None = None
    updates_per_step: int = 1
    parameters: int | None = None
    step_time: float | None = None
    step_times: list[float] = Field(default_factory=list)
    epoch_time: float | None = None
    throughput: float | None = None
    throughput_unit: str = "samples"
    scaling_efficiency: float | None = None
    peak_memory: list[int] = Field(default_factory=list)
    memory: list[RankMemory] = Field(default_factory=list)
    communication: dict[str, float] = Field(default_factory=dict)
    validation: dict[str, float] = Field(default_factory=dict)
    curve: list[CurvePoint] = Field(default_factory=list)
    train_losses: list[float | None] = Field(default_factory=list)
    target_metric: str | None = None
    time_to_target: float | None = None
    wall_time: float | None = None
    trace: str | None = None
    folder: str | None = None
    predicted: dict[str, Any] | None = None

    @field_validator("validation", "communication", mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        """A NaN (JSON: null) in a table of numbers is a quantity that is not known: it is left out."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and item == item}


class Summary(BaseModel):
    """The repeats of one strategy on one device count, taken together.

    Numbers are medians over the repeats that ended ``ok`` (where none did: ``diverged``); ``spread`` holds
    ``[min, max]`` per name. ``status`` is the first that is not ``ok``; ``num_ok`` says of how many repeats it is not
    true. ``peak_memory`` is the largest of the repeats, per rank. ``time_to_target`` is None unless half or more of the
    repeats reached the target. ``curve``, ``memory``, ``communication`` and ``trace`` are of the first good repeat.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    data: str
    scaling: str
    strategy: str
    preset: str
    num_devices: int
    status: Status
    reason: str
    num_repeats: int
    num_ok: int
    global_batch_size: int
    step_time: float | None
    epoch_time: float | None
    throughput: float | None
    throughput_unit: str
    scaling_efficiency: float | None
    peak_memory: list[int]
    memory: list[RankMemory]
    communication: dict[str, float]
    validation: dict[str, float]
    curve: list[CurvePoint]
    target_metric: str | None
    time_to_target: float | None
    spread: dict[str, list[float]]
    predicted: dict[str, Any] | None
    trace: str | None


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Appends records to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")


def read_lines(path: Path) -> list[Record]:
    """Every record of a JSON-lines file; a half-written last line (a killed run) is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            payload = json.loads(line)
        except json.JSONDecodeError:
            continue
        records.append(Record.model_validate(payload))
    return records


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Groups measured records by (model, data, scaling, preset, strategy, devices, batch), in order of appearance.

    A ``predicted`` record fills the ``predicted`` field of its group; one without a measurement is left out.
    """
    groups: dict[tuple[str | int, ...], list[Record]] = {}
    predictions: dict[tuple[str | int, ...], Record] = {}
    for record in records:
        if record.kind == "predicted":
            predictions[_group_key(record)] = record
        else:
            groups.setdefault(_group_key(record), []).append(record)
    return [_summarise_group(group, predictions.get(key)) for key, group in groups.items()]


def _group_key(record: Record) -> tuple[str | int, ...]:
    r = record
    return (r.model, r.data, r.scaling, r.preset, r.strategy, r.num_devices, r.global_batch_size)


def with_scaling_efficiency(records: Sequence[Record]) -> list[Record]:
    """Adds ``throughput / (num_devices × throughput of single on one device)``; that one of the same model and data."""
    base: dict[tuple[str, str], list[float]] = {}
    for r in records:
        if r.num_devices == 1 and r.strategy == "single" and r.throughput and r.kind == "measured":
            base.setdefault((r.model, r.data), []).append(r.throughput)
    one = {key: statistics.median(values) for key, values in base.items()}
    return [
        r.model_copy(update={"scaling_efficiency": r.throughput / (r.num_devices * one[r.model, r.data])})
        if r.throughput and (r.model, r.data) in one
        else r
        for r in records
    ]


_MEDIANS = ("step_time", "epoch_time", "throughput", "scaling_efficiency")


def _summarise_group(group: Sequence[Record], prediction: Record | None) -> Summary:
    good = [r for r in group if r.status == "ok"] or [r for r in group if r.status == "diverged"]
    bad = [r for r in group if r.status != "ok"]
    first = (good or group)[0]
    known = {name: values for name in _MEDIANS if (values := _known(good, name))}
    validation = {key: [r.validation[key] for r in good if key in r.validation] for key in first.validation}
    peaks = [max(r.peak_memory) for r in good if r.peak_memory]
    return Summary(
        model=first.model,
        data=first.data,
        scaling=first.scaling,
        strategy=first.strategy,
        preset=first.preset,
        num_devices=first.num_devices,
        status=bad[0].status if bad else "ok",
        reason=bad[0].reason if bad else "",
        num_repeats=len(group),
        num_ok=len(group) - len(bad),
        global_batch_size=first.global_batch_size,
        throughput_unit=first.throughput_unit,
        peak_memory=[max(values) for values in zip(*(r.peak_memory for r in good if r.peak_memory))],
        memory=first.memory,
        communication=first.communication,
        validation={key: statistics.median(values) for key, values in validation.items() if values},
        curve=first.curve,
        target_metric=first.target_metric,
        time_to_target=_time_to_target(good),
        spread={name: [min(values), max(values)] for name, values in (known | validation).items() if values}
        | ({"peak_memory": [min(peaks), max(peaks)]} if peaks else {})
        | _spread_of_target(good),
        predicted=first.predicted or (_as_prediction(prediction) if prediction else None),
        trace=first.trace,
        **{name: statistics.median(known[name]) if name in known else None for name in _MEDIANS},
    )


def _time_to_target(good: Sequence[Record]) -> float | None:
    """Median in which a repeat that never got there counts as infinitely slow: the lucky ones alone would flatter."""
    times = [r.time_to_target if r.time_to_target is not None else math.inf for r in good]
    median = statistics.median_low(times) if times else math.inf
    return median if math.isfinite(median) else None


def _spread_of_target(good: Sequence[Record]) -> dict[str, list[float]]:
    times = [r.time_to_target for r in good if r.time_to_target is not None]
    return {"time_to_target": [min(times), max(times)]} if times and len(times) == len(good) else {}


def _as_prediction(record: Record) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in (*_MEDIANS, "peak_memory")}
    return {name: value for name, value in values.items() if value}


def _known(records: Sequence[Record], name: str) -> list[float]:
    return [value for r in records if (value := getattr(r, name)) is not None]

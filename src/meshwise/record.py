"""Record: one training under one strategy, predicted or measured, with the same fields. JSON lines on disk.

All values are in base units (s, B, samples). A quantity that is not known is ``None``; it is never zero.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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

    ``parameters``, ``gradients`` and ``optimizer_state`` are what is held between steps (gradients: at the end of
    backward); ``activations`` and ``other`` are the rest live at the peak, by the phase that allocated it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    peak: int
    phase: str
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    other: int
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


class Summary(BaseModel):
    """The repeats of one strategy on one device count, taken together.

    Numbers are medians over the repeats that ended ``ok`` (or ``diverged``); ``spread`` holds ``[min, max]`` per name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: str
    preset: str
    num_devices: int
    status: Status
    reason: str
    num_repeats: int
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
    """Groups records by (preset, strategy, devices), in order of first appearance."""
    groups: dict[tuple[str, str, int, int], list[Record]] = {}
    for record in records:
        key = (record.preset, record.strategy, record.num_devices, record.global_batch_size)
        groups.setdefault(key, []).append(record)
    return [_summarise_group(group) for group in groups.values()]


def with_scaling_efficiency(records: Sequence[Record]) -> list[Record]:
    """Adds ``throughput / (num_devices × throughput of single on one device)`` where that one ran."""
    base = [r.throughput for r in records if r.num_devices == 1 and r.strategy == "single" and r.throughput]
    if not base:
        return list(records)
    one = statistics.median(base)
    return [
        r.model_copy(update={"scaling_efficiency": r.throughput / (r.num_devices * one)}) if r.throughput else r
        for r in records
    ]


def _summarise_group(group: Sequence[Record]) -> Summary:
    good = [r for r in group if r.status == "ok"] or [r for r in group if r.status == "diverged"]
    shown = good or list(group)
    bad = [r for r in group if r.status != "ok"]
    first = shown[0]
    names = ("step_time", "epoch_time", "throughput", "scaling_efficiency", "time_to_target")
    medians = {name: _median([getattr(r, name) for r in good]) for name in names}
    spread = {name: [min(values), max(values)] for name in names if (values := _known(good, name))}
    validation = {}
    for key in first.validation:
        values = [r.validation[key] for r in good if key in r.validation]
        if values:
            validation[key] = statistics.median(values)
            spread[key] = [min(values), max(values)]
    return Summary(
        strategy=first.strategy,
        preset=first.preset,
        num_devices=first.num_devices,
        status=bad[0].status if bad else "ok",
        reason=bad[0].reason if bad else "",
        num_repeats=len(group),
        global_batch_size=first.global_batch_size,
        throughput_unit=first.throughput_unit,
        peak_memory=[max(values) for values in zip(*(r.peak_memory for r in good if r.peak_memory))],
        memory=first.memory,
        communication=first.communication,
        validation=validation,
        curve=first.curve,
        spread=spread,
        predicted=first.predicted,
        trace=first.trace,
        **medians,
    )


def _known(records: Sequence[Record], name: str) -> list[float]:
    return [value for r in records if (value := getattr(r, name)) is not None]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

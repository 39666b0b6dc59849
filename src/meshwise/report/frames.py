"""Tidy rows behind the figures: one dict per point, values in base units. Points that are not known are not there."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from meshwise.record import CurvePoint, RankMemory, Record, Summary
from meshwise.report.sheet import peak_memory
from meshwise.report.study import Study

Rows = list[dict[str, Any]]

_MAX_POINTS = 60
_DIGITS = 5
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "other")


def over_devices(study: Study, name: str) -> Rows:
    """``name`` of every summary that ended well: strategy, num_devices, value, low, high (over repeats).

    The one-device run stands at N = 1 of every strategy that has none of its own: there, every split is that run.
    """
    found = {(s.preset, s.num_devices): s for s in study.good if _value(s, name) is not None}
    rows = [_point(s, name, strategy=s.preset) for s in found.values()]
    for preset in dict.fromkeys(preset for preset, _ in found):
        one = _one_device_run(found, preset)
        if one is not None and (preset, 1) not in found:
            rows.append(_point(one, name, strategy=preset))
    return sorted(rows, key=lambda row: (row["strategy"], row["num_devices"]))


def memory_split(study: Study) -> Rows:
    """Parts of the memory of the fullest rank of each run: strategy, num_devices, part, value."""
    rows: Rows = []
    for summary in study.good:
        if not summary.memory:
            continue
        fullest: RankMemory = max(summary.memory, key=lambda rank: rank.peak)
        rows += [_part(summary, part.replace("_", " "), getattr(fullest, part)) for part in PARTS]
    return rows


def communication_split(study: Study) -> Rows:
    """Bytes a step of each run by kind: strategy, num_devices, part, value. Runs that send nothing have no rows."""
    return [
        _part(summary, kind, value)
        for summary in study.good
        for kind, value in summary.communication.items()
        if value > 0
    ]


def curves(study: Study, metric: str) -> Rows:
    """Validation during training: strategy, num_devices, epoch, time, value, low, high, end.

    Medians over the repeats that got that far; ``end`` is "diverged" on the last finite point of a diverged run.
    """
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in study.records:
        if record.kind == "measured" and record.status in ("ok", "diverged") and record.curve:
            groups.setdefault((record.preset, record.num_devices), []).append(record)
    return [row for key, group in groups.items() for row in _curve(key, group, metric)]


def predictions(study: Study) -> Rows:
    """Predicted beside measured step time: strategy, num_devices, measured, predicted (s)."""
    return [
        {
            "strategy": s.preset,
            "num_devices": s.num_devices,
            "measured": s.step_time,
            "predicted": float(predicted),
            "error": predicted / s.step_time - 1,
        }
        for s in study.good
        if s.step_time and isinstance(predicted := (s.predicted or {}).get("step_time"), int | float)
    ]


def _value(summary: Summary, name: str) -> float | None:
    return peak_memory(summary) if name == "peak_memory" else getattr(summary, name)


def _point(summary: Summary, name: str, *, strategy: str) -> dict[str, Any]:
    value = _value(summary, name)
    low, high = summary.spread.get(name, [value, value])
    return {"strategy": strategy, "num_devices": summary.num_devices, "value": value, "low": low, "high": high}


def _one_device_run(found: dict[tuple[str, int], Summary], preset: str) -> Summary | None:
    """The undivided run a strategy scales from: the one of its own precision."""
    wanted = _precision(preset)
    return next((s for (name, count), s in found.items() if count == 1 and _precision(name) == wanted), None)


def _precision(preset: str) -> str:
    match = re.search(r"precision=([^,]+)", preset)
    return match[1] if match else "fp32"


def _part(summary: Summary, part: str, value: float) -> dict[str, Any]:
    return {"strategy": summary.preset, "num_devices": summary.num_devices, "part": part, "value": value}


def _curve(key: tuple[str, int], group: list[Record], metric: str) -> Rows:
    by_step: dict[int, list[CurvePoint]] = {}
    for record in group:
        for point in record.curve:
            if _finite(getattr(point, metric)):
                by_step.setdefault(point.step, []).append(point)
    rows: Rows = []
    for step in _thinned(sorted(by_step)):
        points = by_step[step]
        values = [getattr(point, metric) for point in points]
        rows.append(
            {
                "strategy": key[0],
                "num_devices": key[1],
                "epoch": _median(points, lambda point: point.epoch),
                "time": _median(points, lambda point: point.time),
                "value": _rounded(statistics.median(values)),
                "low": _rounded(min(values)),
                "high": _rounded(max(values)),
                "end": "",
            }
        )
    if rows and any(record.status == "diverged" for record in group):
        rows[-1]["end"] = "diverged"
    return rows


def _median(points: Iterable[CurvePoint], value: Callable[[CurvePoint], float]) -> float:
    return _rounded(statistics.median(value(point) for point in points))


def _rounded(value: float) -> float:
    """Enough digits to draw with: a page holds thousands of points."""
    return float(f"{value:.{_DIGITS}g}")


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _thinned(steps: list[int]) -> list[int]:
    """At most ``_MAX_POINTS`` steps, evenly spread, first and last kept: a page holds many curves."""
    if len(steps) <= _MAX_POINTS:
        return steps
    last = len(steps) - 1
    return [steps[round(index * last / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]

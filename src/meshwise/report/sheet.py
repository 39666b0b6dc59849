"""Sheet: the comparison table as text cells, the same in the terminal and on the page.

A column has one unit, chosen by its largest value; what is not known is "–", never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwise.record import Summary
from meshwise.report.study import Study
from meshwise.units import common_unit

UNKNOWN = "–"
_SMALLEST_SHOWN = 0.001


@dataclass(frozen=True, kw_only=True)
class Column:
    """``unit`` is printed under the title."""

    key: str
    title: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``spread`` is half of what lies between the smallest and largest repeat, in the column's unit."""

    text: str
    spread: str = ""
    best: bool = False

    def __str__(self) -> str:
        return f"{self.text}±{self.spread}" if self.spread else self.text


@dataclass(frozen=True, kw_only=True)
class Row:
    preset: str
    num_devices: int
    status: str
    cells: dict[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Note:
    """Why a row has no numbers, or fewer than its repeats."""

    preset: str
    num_devices: int
    status: str
    count: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sheet:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True)
class _Field:
    """What a column takes from a summary, in base units; ``better`` is -1 where less is better, 0 where neither is."""

    key: str
    title: str
    value: Callable[[Summary], float | None]
    unit: str
    better: int = 0
    spread: str = ""


def sheet(study: Study) -> Sheet:
    """The table of one study: a row per strategy and device count, by device count, then speed."""
    columns: list[Column] = []
    cells: list[dict[str, Cell]] = [{} for _ in study.summaries]
    for field in _fields(study):
        factor, unit = _unit(field, study.summaries)
        columns.append(Column(key=field.key, title=field.title, unit=unit))
        best = _best_texts(field, study.summaries, factor)
        for index, summary in enumerate(study.summaries):
            cells[index][field.key] = _cell(field, summary, factor, best=best)
    step_factor, step_unit = common_unit([s.step_time for s in study.summaries], "s")
    columns.append(Column(key="predicted", title="predicted", unit=f"step, {step_unit}"))
    for index, summary in enumerate(study.summaries):
        cells[index]["predicted"] = _predicted(summary, step_factor)
    return Sheet(
        title=study.title,
        columns=tuple(columns),
        rows=tuple(
            Row(preset=s.preset, num_devices=s.num_devices, status=status_of(s), cells=cells[index])
            for index, s in enumerate(study.summaries)
        ),
        notes=tuple(_note(s) for s in study.summaries if s.status != "ok"),
    )


def peak_memory(summary: Summary) -> float | None:
    """Bytes of the fullest rank at its peak."""
    return max(summary.peak_memory) if summary.peak_memory else None


def communication(summary: Summary) -> float | None:
    """Payload bytes a step, all kinds; zero only where one device has nobody to talk to."""
    if summary.communication:
        return sum(summary.communication.values())
    return 0.0 if summary.num_devices == 1 and summary.num_ok else None


def status_of(summary: Summary) -> str:
    """``ok``, what went wrong, or how many of the repeats ended well."""
    if 0 < summary.num_ok < summary.num_repeats:
        return f"{summary.num_ok}/{summary.num_repeats} ok"
    return "stopped" if summary.status == "interrupted" else summary.status


def number(value: float, *, digits: int = 3) -> str:
    """``value`` with three significant digits, no exponent, at most three decimals."""
    if value and abs(value) < _SMALLEST_SHOWN:
        return f"<{_SMALLEST_SHOWN}"
    return f"{value:.{decimals(value, digits=digits)}f}"


def decimals(value: float, *, digits: int = 3) -> int:
    return min(3, max(0, digits - 1 - math.floor(math.log10(abs(value))))) if value else 0


def _fields(study: Study) -> list[_Field]:
    unit = next((s.throughput_unit for s in study.good), "samples")
    fields = [
        _Field(key="step_time", title="step", value=lambda s: s.step_time, unit="s", better=-1, spread="step_time"),
        _Field(key="epoch_time", title="epoch", value=lambda s: s.epoch_time, unit="s", better=-1),
        _Field(key="throughput", title="speed", value=lambda s: s.throughput, unit=f"{unit}/s", better=1),
        _Field(key="efficiency", title="eff.", value=lambda s: s.scaling_efficiency, unit="%", better=1),
        _Field(key="memory", title="memory", value=peak_memory, unit="B", better=-1),
        _Field(key="communication", title="comm.", value=communication, unit="B"),
    ]
    metric = study.metric
    if metric is not None:
        title = {"validation_loss": "loss"}.get(metric, metric)
        better, shown = (1, "%") if metric == "accuracy" else (-1, "")
        value = _validation(metric)
        fields.append(_Field(key="metric", title=title, value=value, unit=shown, better=better, spread=metric))
    target = next((s.target_metric for s in study.summaries if s.target_metric), None)
    if target is not None:
        fields.append(
            _Field(
                key="target",
                title="to target",
                value=lambda s: s.time_to_target,
                unit="s",
                better=-1,
                spread="time_to_target",
            )
        )
    return fields


def _validation(metric: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary.validation.get(metric)


def _unit(field: _Field, summaries: Sequence[Summary]) -> tuple[float, str]:
    """Divide by the first, print the second."""
    if field.unit == "%":
        return 1 / 100, "%"
    if not field.unit:
        return 1.0, ""
    return common_unit([field.value(s) for s in summaries], field.unit)


def _text(field: _Field, summary: Summary, factor: float) -> str | None:
    value = field.value(summary)
    if value is None or not math.isfinite(value):
        return None
    if field.unit == "%":
        return f"{value / factor:.{1 if field.key == 'metric' else 0}f}"
    return number(value / factor, digits=4 if field.key == "metric" else 3)


def _best_texts(field: _Field, summaries: Sequence[Summary], factor: float) -> dict[int, str]:
    """Device count → text of its best value; two that print alike are equally good. Nothing wins alone."""
    best: dict[int, str] = {}
    if not field.better:
        return best
    for count in {s.num_devices for s in summaries}:
        values = [
            (value * field.better, text)
            for s in summaries
            if s.num_devices == count
            and s.num_ok
            and (value := field.value(s)) is not None
            and (text := _text(field, s, factor)) is not None
        ]
        if len({text for _, text in values}) > 1:
            best[count] = max(values)[1]
    return best


def _cell(field: _Field, summary: Summary, factor: float, *, best: dict[int, str]) -> Cell:
    text = _text(field, summary, factor)
    if text is None:
        return Cell(text=UNKNOWN)
    spread = ""
    if summary.num_ok > 1 and field.spread in summary.spread:
        low, high = summary.spread[field.spread]
        spread = f"{(high - low) / 2 / factor:.{len(text.partition('.')[2])}f}"
    won = bool(summary.num_ok) and best.get(summary.num_devices) == text
    return Cell(text=text, spread=spread, best=won)


def _predicted(summary: Summary, factor: float) -> Cell:
    """Predicted step time and its signed error, (predicted − measured) / measured."""
    value = (summary.predicted or {}).get("step_time")
    if not isinstance(value, int | float):
        return Cell(text=UNKNOWN)
    text = number(value / factor)
    if summary.step_time:
        text += f" {value / summary.step_time - 1:+.0%}"
    return Cell(text=text)


def _note(summary: Summary) -> Note:
    bad = summary.num_repeats - summary.num_ok
    return Note(
        preset=summary.preset,
        num_devices=summary.num_devices,
        status=summary.status,
        count=f"{bad} of {summary.num_repeats} repeats" if summary.num_repeats > 1 else "",
        reason=summary.reason or "no reason was recorded",
    )

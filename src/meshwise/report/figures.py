"""The survey's figures as Vega-Lite, made with altair: one function each, from tidy rows to a ``Figure``.

Ink is ``currentColor``, so that a figure follows the page into dark mode and onto paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from meshwise.report import frames
from meshwise.report.extra import load
from meshwise.report.frames import Rows
from meshwise.report.marks import bars, config, devices_axis, isolate, line_layers, look, scaled
from meshwise.report.study import Study
from meshwise.report.style import KINDS, PARTS, Style
from meshwise.units import common_unit, show

_HEIGHT = 280
_METRIC_TITLES = {
    "perplexity": "validation perplexity",
    "accuracy": "validation accuracy",
    "validation_loss": "validation loss",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``spec`` is Vega-Lite; ``wide`` figures take the page's whole width."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]
    wide: bool = False


def figures(study: Study, styles: dict[str, Style]) -> list[Figure]:
    """Every figure the study has data for.

    Raises:
        MissingPackage: altair is not installed.
    """
    alt = load("altair")
    made = [
        _epoch_time(alt, study, styles),
        _throughput(alt, study, styles),
        _efficiency(alt, study, styles),
        _memory(alt, study, styles),
        *_validation(alt, study, styles),
        _memory_split(alt, study),
        _communication(alt, study),
        _predictions(alt, study, styles),
    ]
    return [figure for figure in made if figure is not None]


def _epoch_time(alt: ModuleType, study: Study, styles: dict[str, Style]) -> Figure | None:
    rows = frames.over_devices(study, "epoch_time")
    chart = _over_devices(alt, rows, styles, title="epoch time", unit="s", ideal="inverse")
    return _figure(chart, "epoch-time", "Epoch time", "Time to train on every sample once; less is better.", ideal=rows)


def _throughput(alt: ModuleType, study: Study, styles: dict[str, Style]) -> Figure | None:
    rows = frames.over_devices(study, "throughput")
    unit = next((s.throughput_unit for s in study.good), "samples")
    chart = _over_devices(alt, rows, styles, title="throughput", unit=f"{unit}/s", ideal="proportional")
    caption = f"{unit.capitalize()} trained on a second, all devices together; more is better."
    return _figure(chart, "throughput", "Throughput", caption, ideal=rows)


def _efficiency(alt: ModuleType, study: Study, styles: dict[str, Style]) -> Figure | None:
    rows = frames.over_devices(study, "scaling_efficiency") if len(study.device_counts) > 1 else []
    chart = _over_devices(alt, rows, styles, title="scaling efficiency", unit="%", ideal="constant")
    caption = "Throughput as a share of the one-device throughput times the number of devices."
    return _figure(chart, "efficiency", "Scaling efficiency", caption, ideal=rows)


def _memory(alt: ModuleType, study: Study, styles: dict[str, Style]) -> Figure | None:
    rows = frames.over_devices(study, "peak_memory")
    chart = _over_devices(alt, rows, styles, title="peak memory per device", unit="B", ideal="none")
    caption = "Peak of the fullest device in a training step; less is better."
    return _figure(chart, "memory", "Memory per device", caption)


def _validation(alt: ModuleType, study: Study, styles: dict[str, Style]) -> list[Figure | None]:
    """Against epochs (what is learnt from a sample) and against time (what is learnt from a second)."""
    if study.metric is None:
        return []
    rows = frames.curves(study, study.metric)
    word = _METRIC_TITLES[study.metric].removeprefix("validation ")
    factor, unit = common_unit([row["time"] for row in rows], "s")
    timed = scaled(rows, factor, ("time",))
    return [
        _figure(
            _curves(alt, rows, styles, x="epoch", x_title="epochs", metric=study.metric),
            "validation-epochs",
            f"Validation {word} against epochs",
            "What each strategy learns from the same samples; synchronous ones should coincide.",
        ),
        _figure(
            _curves(alt, timed, styles, x="time", x_title=f"training time ({unit})", metric=study.metric),
            "validation-time",
            f"Validation {word} against time",
            "What each strategy has learnt after the same time; validation itself is not counted.",
        ),
    ]


def _memory_split(alt: ModuleType, study: Study) -> Figure | None:
    rows = frames.memory_split(study)
    chart = bars(alt, *_in_unit(rows, "B", "peak memory of the fullest device"), PARTS) if rows else None
    caption = "What fills the fullest device at its peak; one bar per strategy and device count."
    return _figure(chart, "memory-split", "Where the memory goes", caption, wide=True)


def _communication(alt: ModuleType, study: Study) -> Figure | None:
    rows = frames.communication_split(study)
    chart = bars(alt, *_in_unit(rows, "B", "payload a step and device"), KINDS) if rows else None
    caption = "What a device hands to others in one step, by kind of communication, mean over devices."
    return _figure(chart, "communication", "Communication volume", caption, wide=True)


def _predictions(alt: ModuleType, study: Study, styles: dict[str, Style]) -> Figure | None:
    rows = frames.predictions(study)
    if not rows:
        return None
    names = [name for name in styles if name in {row["strategy"] for row in rows}]
    factor, unit = common_unit([row[key] for row in rows for key in ("measured", "predicted")], "s")
    rows = scaled(rows, factor, ("measured", "predicted"))
    largest = max(max(row["measured"], row["predicted"]) for row in rows)
    line = alt.Chart(alt.Data(values=[{"at": 0}, {"at": largest}])).mark_line(
        color="currentColor", opacity=0.5, strokeDash=[2, 3], strokeWidth=1.5
    )
    pick = isolate(alt)
    points = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=80)
        .encode(
            x=alt.X("measured:Q", title=f"measured step time ({unit})"),
            y=alt.Y("predicted:Q", title=f"predicted step time ({unit})"),
            opacity=alt.condition(pick, alt.value(1), alt.value(0.08)),
            tooltip=[
                alt.Tooltip("strategy:N"),
                alt.Tooltip("num_devices:O", title="devices"),
                alt.Tooltip("measured:Q", title=f"measured ({unit})", format=".3~g"),
                alt.Tooltip("predicted:Q", title=f"predicted ({unit})", format=".3~g"),
                alt.Tooltip("error:Q", title="error", format="+.1%"),
            ],
            **look(alt, names, styles, marks="points"),
        )
        .add_params(pick)
    )
    chart = alt.layer(line.encode(x="at:Q", y="at:Q"), points)
    return _figure(chart, "predictions", "Predicted against measured", "On the dotted line the prediction was right.")


def _over_devices(
    alt: ModuleType, rows: Rows, styles: dict[str, Style], *, title: str, unit: str, ideal: str
) -> Any | None:
    """Lines over device counts with whiskers from the fastest to the slowest repeat, and the ideal from one device."""
    if not rows:
        return None
    names = [name for name in styles if name in {row["strategy"] for row in rows}]
    shown, axis_title = _in_unit(rows, unit, title)
    counts = sorted({row["num_devices"] for row in rows})
    x = devices_axis(alt, counts)
    y = alt.Y("value:Q", title=axis_title, scale=alt.Scale(zero=True, nice=True))
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("num_devices:O", title="devices"),
        alt.Tooltip("text:N", title=title),
    ]
    layers = line_layers(alt, shown, names, styles, x=x, y=y, tooltip=tooltip, spread="rule")
    reference = _ideal(shown, counts, ideal)
    if reference:
        line = alt.Chart(alt.Data(values=reference)).mark_line(
            color="currentColor", opacity=0.55, strokeDash=[2, 3], strokeWidth=1.5
        )
        layers.insert(0, line.encode(x=x, y=y, tooltip=[alt.Tooltip("text:N", title="ideal")]))
    return alt.layer(*layers)


def _curves(alt: ModuleType, rows: Rows, styles: dict[str, Style], *, x: str, x_title: str, metric: str) -> Any | None:
    """Validation curves on one device count (chosen beneath the figure), ``single`` always among them."""
    if not rows:
        return None
    names = [name for name in styles if name in {row["strategy"] for row in rows}]
    counts = sorted({row["num_devices"] for row in rows})
    chosen = alt.param(
        name="devices",
        value=counts[-1],
        bind=alt.binding_select(options=counts, name="devices "),
    )
    scale = alt.Scale(type="log", nice=False) if metric == "perplexity" else alt.Scale(zero=False)
    axis = alt.Axis(format=".0%") if metric == "accuracy" else alt.Axis(format=".3~g", tickCount=6)
    y = alt.Y("value:Q", title=_METRIC_TITLES[metric], scale=scale, axis=axis)
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("num_devices:O", title="devices"),
        alt.Tooltip(f"{x}:Q", title=x_title, format=".3~g"),
        alt.Tooltip("value:Q", title=metric.replace("_", " "), format=".1%" if metric == "accuracy" else ".4~g"),
        alt.Tooltip("end:N", title="ended"),
    ]
    layers = line_layers(
        alt,
        rows,
        names,
        styles,
        x=alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(tickCount=7)),
        y=y,
        tooltip=tooltip,
        spread="band",
    )
    chart = alt.layer(*layers)
    if len(counts) > 1:
        chart = chart.add_params(chosen).transform_filter("datum.num_devices == devices || datum.num_devices == 1")
    return chart


def _ideal(rows: Rows, counts: list[int], kind: str) -> Rows:
    """What one device's value would become if N devices were N times as fast."""
    one = next((row["value"] for row in rows if row["num_devices"] == 1), None)
    if one is None or len(counts) < 2 or kind == "none":
        return []
    power = {"inverse": -1, "proportional": 1, "constant": 0}[kind]
    smooth = sorted({*counts, *(counts[0] * (counts[-1] / counts[0]) ** (step / 24) for step in range(25))})
    return [
        {"num_devices": count, "value": one * count**power, "text": f"one device × {count:.3g}"} for count in smooth
    ]


def _in_unit(rows: Rows, unit: str, title: str) -> tuple[Rows, str]:
    """Rows in the unit that suits their largest value, and the axis title that names it."""
    if unit == "%":
        factor, name = 1 / 100, "%"
        texts = [f"{row['value']:.0%}" for row in rows]
    else:
        factor, name = common_unit(_totals(rows), unit)
        texts = [show(row["value"], unit) for row in rows]
    shown = scaled(rows, factor, ("value", "low", "high"))
    return [{**row, "text": text} for row, text in zip(shown, texts, strict=True)], f"{title} ({name})"


def _totals(rows: Rows) -> Iterable[float]:
    """Height of each bar; of rows that are not stacked, the values themselves."""
    totals: dict[Any, float] = {}
    for index, row in enumerate(rows):
        key = (row["strategy"], row["num_devices"]) if "part" in row else index
        totals[key] = totals.get(key, 0.0) + row["value"]
    return totals.values()


def _figure(
    chart: Any | None, name: str, title: str, caption: str, *, ideal: Rows | None = None, wide: bool = False
) -> Figure | None:
    if chart is None:
        return None
    if ideal and len({row["num_devices"] for row in ideal}) > 1 and any(row["num_devices"] == 1 for row in ideal):
        caption += " Dotted: ideal scaling from one device."
    spec = chart.properties(width="container", height=chart.height if wide else _HEIGHT).configure(**config()).to_dict()
    del spec["$schema"]  # an address the page would never ask for, and need not name
    return Figure(name=name, title=title, caption=caption, spec=spec, wide=wide)

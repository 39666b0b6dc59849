"""Marks, axes and legends that the figures share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from meshwise.report.frames import Rows
from meshwise.report.style import DASHES, Style, colours

_LEGEND_COLUMNS = 3
_BAR_STEP = 17
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def isolate(alt: ModuleType) -> Any:
    """The choice made by clicking names in the legend; the page carries it from figure to figure."""
    return alt.selection_point(name="pick", fields=["strategy"], bind="legend")


def look(alt: ModuleType, names: list[str], styles: dict[str, Style], *, marks: str) -> dict[str, Any]:
    """Colour, dash and shape channels over one domain; the legends of colour and shape merge into one.

    Dashes stay out of the legend, where they would outline its symbols; they have the field ``line``, because Vega-Lite
    merges legends of one domain even where one of them is switched off.
    """
    legend = alt.Legend(title=None, orient="bottom", columns=_LEGEND_COLUMNS, symbolSize=70)

    def scale(values: list[Any]) -> Any:
        return alt.Scale(domain=names, range=values)

    channels = {"color": alt.Color("strategy:N", scale=scale([styles[n].colour for n in names]), legend=legend)}
    if marks == "lines":
        dashes = alt.Scale(domain=list(DASHES), range=[list(dash) for dash in DASHES.values()])
        channels["strokeDash"] = alt.StrokeDash("line:N", scale=dashes, legend=None)
    if marks == "points":
        channels["shape"] = alt.Shape("strategy:N", scale=scale([styles[n].shape for n in names]), legend=legend)
    return channels


def devices_axis(alt: ModuleType, counts: list[int]) -> Any:
    """Device counts on a logarithmic axis: doubling is the same step everywhere."""
    domain = [counts[0] * 0.93, counts[-1] * 1.07]
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    return alt.X("num_devices:Q", title="devices", scale=scale, axis=alt.Axis(values=counts, format="d", grid=False))


def line_layers(
    alt: ModuleType,
    rows: Rows,
    names: list[str],
    styles: dict[str, Style],
    *,
    x: Any,
    y: Any,
    tooltip: Any,
    spread: str,
) -> list[Any]:
    """Spread (``band`` or ``rule``), line, points, and a cross where a diverged run ends."""
    pick = isolate(alt)
    base = alt.Chart(alt.Data(values=[{**row, "line": styles[row["strategy"]].line} for row in rows])).encode(x=x)

    def fade(shown: float) -> Any:
        return alt.condition(pick, alt.value(shown), alt.value(0.06))

    layers = []
    colour = look(alt, names, styles, marks="")
    if any(row["low"] != row["high"] for row in rows):
        mark = base.mark_area() if spread == "band" else base.mark_rule(strokeWidth=1.5)
        shade = fade(0.14 if spread == "band" else 0.6)
        layers.append(mark.encode(y=y_between(alt, y, "low"), y2="high:Q", opacity=shade, **colour))
    lines = base.mark_line(strokeWidth=2, strokeJoin="round").encode(
        y=y, opacity=fade(0.95), **look(alt, names, styles, marks="lines")
    )
    points = base.mark_point(filled=True, size=55).encode(
        y=y, opacity=fade(1), tooltip=tooltip, **look(alt, names, styles, marks="points")
    )
    layers += [lines, points.add_params(pick)]
    if any(row.get("end") for row in rows):
        ends = base.transform_filter("datum.end != ''").mark_text(text="✕ diverged", align="left", dx=7, fontSize=11)
        layers.append(ends.encode(y=y, opacity=fade(1), tooltip=tooltip, **colour))
    return layers


def y_between(alt: ModuleType, y: Any, field: str) -> Any:
    """The same axis as ``y`` for the lower end of a spread."""
    channel = y.copy()
    channel.shorthand = f"{field}:Q"
    return channel


def bars(alt: ModuleType, rows: Rows, title: str, table: dict[str, str]) -> Any:
    """Horizontal stacked bars: one per strategy and device count, by device count, parts in colour."""
    rows = [{**row, "bar": f"{row['strategy']} on {row['num_devices']}"} for row in rows]
    hues = colours([row["part"] for row in rows], table)
    parts = list(hues)
    order = list(dict.fromkeys(row["bar"] for row in sorted(rows, key=lambda row: row["num_devices"])))
    rows = [{**row, "place": parts.index(row["part"])} for row in rows]
    y = alt.Y("bar:N", sort=order, title=None, axis=alt.Axis(ticks=False, domain=False))
    stacked = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=y,
            x=alt.X("sum(value):Q", title=title, stack="zero", axis=alt.Axis(tickCount=10)),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=parts, range=[hues[name] for name in parts]),
                legend=alt.Legend(title=None, orient="top", symbolType="square", symbolSize=110),
            ),
            order=alt.Order("place:Q"),
            tooltip=[
                alt.Tooltip("strategy:N"),
                alt.Tooltip("num_devices:O", title="devices"),
                alt.Tooltip("part:N"),
                alt.Tooltip("text:N", title="size"),
            ],
        )
    )
    labels = (
        alt.Chart(alt.Data(values=_bar_ends(rows)))
        .mark_text(align="left", dx=5, fontSize=10, color="currentColor", opacity=0.8)
        .encode(y=y, x=alt.X("value:Q", title=title), text=alt.Text("value:Q", format=".3~g"))
    )
    return alt.layer(stacked, labels).properties(height=len(order) * _BAR_STEP)


def _bar_ends(rows: Rows) -> Rows:
    ends: dict[str, float] = {}
    for row in rows:
        ends[row["bar"]] = ends.get(row["bar"], 0.0) + row["value"]
    return [{"bar": bar, "value": value} for bar, value in ends.items()]


def scaled(rows: Rows, factor: float, names: tuple[str, ...]) -> Rows:
    """Rows with the named values divided by ``factor``."""
    return [{**row, **{name: row[name] / factor for name in names if name in row}} for row in rows]


def config() -> dict[str, Any]:
    """Quiet axes and the page's ink."""
    ink: dict[str, Any] = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 11}
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {
            **ink,
            "titleFontSize": 11,
            "titleFontWeight": "normal",
            "titleOpacity": 0.75,
            "labelOpacity": 0.85,
            "gridColor": "currentColor",
            "gridOpacity": 0.12,
            "domainColor": "currentColor",
            "domainOpacity": 0.4,
            "tickColor": "currentColor",
            "tickOpacity": 0.4,
            "labelLimit": 220,
        },
        "legend": {**ink, "labelLimit": 200, "symbolOpacity": 1, "columnPadding": 14, "rowPadding": 3, "offset": 10},
    }

"""How each strategy looks in every figure: one colour, dash and point shape, the same on every page.

Hues are those of Okabe and Ito (Color Universal Design, 2008), with violet and brown for their black and yellow, which
a dark screen and white paper would swallow. People with any common colour-vision deficiency tell all of them apart (a
test simulates them: Machado et al. 2009, CIE76 distance of 15 or more). Dashes carry a meaning: solid lines are
synchronous, dashed ones asynchronous (stale weights), dotted ones hybrids and variants. Where a hue repeats, dash and
shape differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.report.study import in_order

BLUE, SKY, GREEN, PINK = "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
ORANGE, VERMILION, VIOLET, BROWN, GREY = "#E69F00", "#D55E00", "#863DF4", "#85502C", "#7C828A"
INK = "currentColor"
"""The page's own ink, black on white and white on black: what everything is compared with."""

DASHES = {"solid": (1, 0), "dashed": (7, 4), "dotted": (2, 3)}
"""Kind of line → lengths of dash and gap."""

_HUES = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, VIOLET, BROWN)
_SHAPES = ("triangle-left", "triangle-right", "cross", "diamond", "square")


@dataclass(frozen=True, kw_only=True)
class Style:
    colour: str
    shape: str
    line: str = "solid"


_PRESETS = {
    "single": Style(colour=INK, shape="circle"),
    "data": Style(colour=BLUE, shape="circle"),
    "zero1": Style(colour=SKY, shape="square"),
    "zero2": Style(colour=GREEN, shape="triangle-up"),
    "zero3": Style(colour=PINK, shape="diamond"),
    "tensor": Style(colour=VIOLET, shape="cross"),
    "gpipe": Style(colour=ORANGE, shape="triangle-down"),
    "1f1b": Style(colour=VERMILION, shape="circle"),
    "interleaved": Style(colour=BROWN, shape="square"),
    "pipedream": Style(colour=VERMILION, shape="diamond", line="dashed"),
    "pipedream-vsync": Style(colour=ORANGE, shape="square", line="dashed"),
    "pipedream-2bw": Style(colour=BLUE, shape="triangle-up", line="dashed"),
}

PARTS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": GREEN,
    "activations": ORANGE,
    "other": GREY,
}
"""Part of a rank's memory → colour."""

KINDS = {
    "all_reduce": BLUE,
    "reduce_scatter": SKY,
    "all_gather": GREEN,
    "send": ORANGE,
    "broadcast": PINK,
    "all_to_all": VERMILION,
}
"""Kind of communication → colour; a kind not listed takes the hues left over."""


def styles(presets: Iterable[str]) -> dict[str, Style]:
    """Style per strategy, in the order of the legend. A preset always looks the same; others take the next free one."""
    chosen: dict[str, Style] = {}
    taken = 0
    for name in in_order(presets):
        if name in _PRESETS:
            chosen[name] = _PRESETS[name]
            continue
        hue, shape = _HUES[taken % len(_HUES)], _SHAPES[(taken + taken // len(_HUES)) % len(_SHAPES)]
        chosen[name] = Style(colour=hue, shape=shape, line="dotted")
        taken += 1
    return chosen


def colours(names: Iterable[str], table: dict[str, str]) -> dict[str, str]:
    """Colour per name: the table's, and the hues left over for names it lacks."""
    names = list(dict.fromkeys(names))
    spare = [hue for hue in (*_HUES, GREY) if hue not in {table.get(name) for name in names}]
    unknown = [name for name in names if name not in table]
    extra = {name: spare[index % len(spare)] if spare else GREY for index, name in enumerate(unknown)}
    return {name: table.get(name) or extra[name] for name in sorted(names, key=lambda n: [*table, *unknown].index(n))}

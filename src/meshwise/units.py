"""Quantities with units: plain base-unit numbers inside, prefixes only at the edge.

The only powers of ten (and of 1024) of the project live here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from meshwise.errors import UnitError

Seconds = float
Bytes = float
Flop = float

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SMALL = {"m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
_TIME = {"min": 60.0, "h": 3600.0, "d": 86400.0}


def parse(text: str, unit: str) -> float:
    """Value of ``text`` in base unit ``unit`` (``B``, ``s``, ``FLOP``, ``FLOP/s``, ``B/s``).

    ``parse("80 GiB", "B") == 85899345920``. A bare number is refused: GB or GiB?

    Raises:
        UnitError: no unit, an unknown prefix, another unit, or not a number.
    """
    match = re.fullmatch(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([^\s0-9].*)?", text)
    if match is None:
        raise UnitError(f"{text!r} is not a quantity; write a number and a unit, such as '1.5 {_example(unit)}'")
    number, suffix = float(match[1]), (match[2] or "").strip()
    if not suffix:
        raise UnitError(f"{text!r} has no unit; write '{match[1]} {_example(unit)}'")
    if unit == "s" and suffix in _TIME:
        return number * _TIME[suffix]
    if not suffix.endswith(unit):
        raise UnitError(f"{text!r} is not in {unit}; write '{match[1]} {_example(unit)}'")
    prefix = suffix[: len(suffix) - len(unit)]
    for table in (_DECIMAL, _BINARY, _SMALL):
        if prefix in table:
            return number * table[prefix]
    raise UnitError(f"{text!r} has the unknown prefix {prefix!r}; use one of k M G T P or Ki Mi Gi Ti")


def show(value: float | None, unit: str, digits: int = 3) -> str:
    """``value`` (base unit) with the prefix people use: bytes in KiB/MiB/GiB, time in s/ms/µs, the rest decimal."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return f"0 {unit}"
    if unit == "B":
        for prefix, factor in reversed(_BINARY.items()):
            if abs(value) >= factor:
                return f"{_significant(value / factor, digits)} {prefix}B"
        return f"{value:.0f} B"
    if unit == "s" and abs(value) < 1:
        for prefix in ("m", "µ", "n"):
            if abs(value) >= _SMALL[prefix]:
                return f"{_significant(value / _SMALL[prefix], digits)} {prefix}s"
    if unit == "s":
        return f"{_significant(value, digits)} s"
    for prefix, factor in sorted(_DECIMAL.items(), key=lambda item: -item[1]):
        if prefix != "K" and abs(value) >= factor:
            return f"{_significant(value / factor, digits)} {prefix}{unit}"
    return f"{_significant(value, digits)} {unit}"


def convert(value: float, given: str, wanted: str) -> float:
    """``value`` in the unit ``given`` as a number of units ``wanted``: ``convert(1500, "ns", "µs") == 1.5``."""
    base = given.removeprefix("µ").removeprefix("n").removeprefix("m") or given
    return value * parse(f"1 {given}", base) / parse(f"1 {wanted}", base)


def _significant(value: float, digits: int) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{decimals}f}"


def _example(unit: str) -> str:
    return {"B": "GiB", "s": "s", "FLOP": "GFLOP", "FLOP/s": "TFLOP/s", "B/s": "GB/s"}.get(unit, unit)


def common_unit(values: Iterable[float | None], unit: str) -> tuple[float, str]:
    """One (factor, name) for a whole column or axis, chosen by its largest value: divide by factor, print name.

    ``common_unit([1e-3, 0.2], "s") == (1e-3, "ms")``. Bytes take KiB, MiB, …; times ms, s, min, h; the rest k, M, G, ….
    """
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    if unit == "B":
        choices = {f"{prefix}B": factor for prefix, factor in _BINARY.items()}
        names, smallest = {"B": 1.0} | choices, 1.0
    elif unit == "s":
        names, smallest = {"µs": _SMALL["µ"], "ms": _SMALL["m"], "s": 1.0, "min": 60.0, "h": 3600.0}, 2.0
    else:
        gap = " " if unit[:1].islower() else ""  # "k tokens/s", but "GFLOP/s"
        names = {(prefix and prefix + gap) + unit: factor for prefix, factor in _DECIMAL.items() if prefix != "K"}
        smallest = 1.0
    fitting = [(factor, name) for name, factor in names.items() if largest >= smallest * factor]
    return max(fitting) if fitting else min((factor, name) for name, factor in names.items())

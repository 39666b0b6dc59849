from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.errors import UnitError
from meshwise.units import parse, show


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80 GiB", "B", 80 * 1024**3),
        ("80GB", "B", 80e9),
        ("1.5 ms", "s", 1.5e-3),
        ("3 µs", "s", 3e-6),
        ("3 us", "s", 3e-6),
        ("2 min", "s", 120),
        ("2 h", "s", 7200),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("1e3 FLOP", "FLOP", 1e3),
        (".5 kB", "B", 500),
        (" -1 s ", "s", -1),
    ],
)
def test_reads_numbers_with_units(text: str, unit: str, value: float) -> None:
    assert parse(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("80", "B", "'80' has no unit; write '80 GiB'"),
        ("80 GiB", "s", "'80 GiB' is not in s; write '80 s'"),
        ("80 XB", "B", "'80 XB' has the unknown prefix 'X'; use one of k M G T P or Ki Mi Gi Ti"),
        ("much", "B", "'much' is not a quantity; write a number and a unit, such as '1.5 GiB'"),
    ],
)
def test_refuses_what_is_ambiguous(text: str, unit: str, message: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse(text, unit)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "–"),
        (math.nan, "s", "–"),
        (0, "B", "0 B"),
        (512, "B", "512 B"),
        (1536, "B", "1.50 KiB"),
        (85899345920, "B", "80.0 GiB"),
        (0.0123, "s", "12.3 ms"),
        (1.5e-6, "s", "1.50 µs"),
        (75.0, "s", "75.0 s"),
        (312e12, "FLOP/s", "312 TFLOP/s"),
        (0.5, "samples", "0.500 samples"),
        (1234.0, "samples", "1.23 ksamples"),
    ],
)
def test_shows_with_the_prefix_people_use(value: float | None, unit: str, text: str) -> None:
    assert show(value, unit) == text


@given(st.floats(1e-8, 1e14), st.sampled_from(["B", "s", "FLOP/s"]))
def test_what_is_shown_reads_back(value: float, unit: str) -> None:
    if unit == "B":
        value = max(1.0, round(value))
    assert parse(show(value, unit, digits=6), unit) == pytest.approx(value, rel=1e-4)

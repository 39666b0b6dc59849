from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from synthetic_survey import survey

from meshwise.record import CurvePoint, Record
from meshwise.report import frames
from meshwise.report.figures import Figure, figures
from meshwise.report.study import Study, studies
from meshwise.report.style import KINDS, PARTS, colours, styles
from meshwise.strategy import PRESETS

pytest.importorskip("altair", reason="figures need the report extra")

# Severity 1.0 of Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, in linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def study(records: list[Record]) -> Study:
    return studies(records)[0]


def made(records: list[Record]) -> dict[str, Figure]:
    one = study(records)
    return {figure.name: figure for figure in figures(one, styles(s.preset for s in one.summaries))}


def data_of(figure: Figure) -> list[dict[str, Any]]:
    """Every row that any layer of the figure draws."""

    def rows(part: Any) -> list[dict[str, Any]]:
        own = part.get("data", {}).get("values", [])
        return [*own, *(row for layer in part.get("layer", []) for row in rows(layer))]

    found = rows(figure.spec)
    assert found
    return found


def linear(colour: str) -> np.ndarray:
    part = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def paper(colour: str, background: str) -> str:
    return {"#ffffff": "#1b1f24", "#191d24": "#e7eaee"}[background] if colour == "currentColor" else colour


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("background", ["#ffffff", "#191d24"])
def test_strategies_with_solid_lines_differ_in_colour_for_every_eye(vision: str, background: str) -> None:
    solid = [paper(style.colour, background) for style in styles(PRESETS).values() if style.line == "solid"]
    assert len(solid) == 9
    for one, other in itertools.combinations(solid, 2):
        apart = np.linalg.norm(lab(VISION[vision] @ linear(one)) - lab(VISION[vision] @ linear(other)))
        assert apart >= 15, (one, other)


@pytest.mark.parametrize("background", ["#ffffff", "#191d24"])
def test_every_colour_stands_out_from_the_page(background: str) -> None:
    def light(colour: str) -> float:
        return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) + 0.05

    for style in styles(PRESETS).values():
        one, other = light(paper(style.colour, background)), light(background)
        assert max(one, other) / min(one, other) > 2.2, style


def test_a_strategy_looks_the_same_whatever_else_is_compared_and_no_two_look_alike() -> None:
    variants = [f"data={n},tensor=2" for n in range(2, 32)]
    everything = styles([*PRESETS, *variants])
    assert len(set(everything.values())) == len(everything) == 42
    assert all(styles([name])[name] == everything[name] for name in PRESETS)


def test_asynchronous_strategies_are_dashed() -> None:
    dashed = {name for name, style in styles(PRESETS).items() if style.line == "dashed"}
    assert dashed == {"pipedream", "pipedream-vsync", "pipedream-2bw"}


def test_unknown_kinds_take_colours_that_are_free() -> None:
    found = colours(["send", "all_reduce", "gossip"], KINDS)
    assert list(found) == ["all_reduce", "send", "gossip"]
    assert len(set(found.values())) == 3
    assert len(set(PARTS.values())) == len(PARTS)


@pytest.fixture(scope="module")
def all_made(records: list[Record]) -> dict[str, Figure]:
    return made(records)


def test_every_figure_of_the_survey_is_made(all_made: dict[str, Figure]) -> None:
    assert list(all_made) == [
        "epoch-time",
        "throughput",
        "efficiency",
        "memory",
        "validation-epochs",
        "validation-time",
        "memory-split",
        "communication",
    ]


def test_predictions_get_a_figure_once_there_are_some(records: list[Record]) -> None:
    filled = [r.model_copy(update={"predicted": {"step_time": 0.03}}) if r.step_time else r for r in records]
    rows = data_of(made(filled)["predictions"])
    assert {row["strategy"] for row in rows if "strategy" in row} >= {"data", "zero3"}
    assert all(row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1) for row in rows if "error" in row)


def test_single_is_the_point_at_one_device_of_every_strategy(records: list[Record]) -> None:
    rows = frames.over_devices(study(records), "epoch_time")
    ones = [row for row in rows if row["num_devices"] == 1]
    assert {row["strategy"] for row in ones} == {row["strategy"] for row in rows}
    assert len({row["value"] for row in ones}) == 1


def test_a_strategy_in_another_precision_does_not_start_from_single(records: list[Record]) -> None:
    other = [
        r.model_copy(update={"preset": "data,precision=bf16"})
        for r in records
        if r.preset == "data" and r.status == "ok"
    ]
    rows = frames.over_devices(study([*records, *other]), "epoch_time")
    assert [row["num_devices"] for row in rows if row["strategy"] == "data,precision=bf16"] == [2, 4]


def test_failed_runs_are_absent_from_figures_not_zero(records: list[Record]) -> None:
    for name in ("epoch_time", "throughput", "scaling_efficiency", "peak_memory"):
        rows = frames.over_devices(study(records), name)
        assert not [row for row in rows if (row["strategy"], row["num_devices"]) == ("zero2", 4)]
        assert all(row["value"] > 0 for row in rows)


def test_axes_are_in_units_people_read(all_made: dict[str, Figure]) -> None:
    figure = all_made["memory"]
    assert "(MiB)" in json.dumps(figure.spec)
    assert all(row["value"] < 1024 for row in data_of(figure))
    assert "epoch time (s)" in json.dumps(all_made["epoch-time"].spec)


def test_spread_reaches_over_the_repeats(records: list[Record]) -> None:
    times = sorted(r.epoch_time or 0 for r in records if (r.preset, r.num_devices) == ("data", 2))
    row = next(
        row
        for row in frames.over_devices(study(records), "epoch_time")
        if (row["strategy"], row["num_devices"]) == ("data", 2)
    )
    assert (row["low"], row["value"], row["high"]) == tuple(times)


def test_a_diverged_curve_ends_at_its_last_finite_point_and_says_so(records: list[Record]) -> None:
    rows = [
        row
        for row in frames.curves(study(records), "perplexity")
        if (row["strategy"], row["num_devices"]) == ("pipedream", 4)
    ]
    assert rows[-1]["end"] == "diverged"
    assert rows[-1]["epoch"] == 1.5
    assert all(row["value"] > 1 for row in rows)
    assert [row["end"] for row in rows[:-1]] == [""] * (len(rows) - 1)


def test_long_curves_are_thinned_and_keep_their_ends(records: list[Record]) -> None:
    curve = [CurvePoint(step=n, epoch=n / 10, time=float(n), perplexity=9.0) for n in range(5000)]
    long = [records[0].model_copy(update={"curve": curve})]
    rows = frames.curves(study(long), "perplexity")
    assert len(rows) <= 60
    assert (rows[0]["time"], rows[-1]["time"]) == (0.0, 4999.0)


def test_the_parts_of_the_fullest_rank_add_up_to_its_peak(records: list[Record]) -> None:
    rows = [row for row in frames.memory_split(study(records)) if (row["strategy"], row["num_devices"]) == ("data", 4)]
    data = next(r for r in records if (r.preset, r.num_devices) == ("data", 4))
    assert sum(row["value"] for row in rows) == max(data.peak_memory)


def test_specs_are_plain_json_and_name_no_address(all_made: dict[str, Figure]) -> None:
    for figure in all_made.values():
        text = json.dumps(figure.spec, allow_nan=False)
        assert "http" not in text


def test_one_device_alone_still_makes_figures() -> None:
    alone = [r for r in survey() if r.num_devices == 1]
    assert {"epoch-time", "memory", "validation-epochs"} <= set(made(alone))
    assert not {"communication", "efficiency"} & set(made(alone))

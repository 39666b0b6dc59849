"""What reports rely on in ``record`` and ``units``."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.record import Record, summarise, with_scaling_efficiency
from meshwise.units import common_unit


def run(**values: Any) -> Record:
    base = {"model": "m", "data": "d", "strategy": "data=2", "preset": "data", "num_devices": 2, "global_batch_size": 8}
    return Record.model_validate({**base, **values})


def test_repeats_are_one_summary_and_models_are_kept_apart() -> None:
    found = summarise([run(step_time=1.0), run(step_time=3.0, repeat=1), run(step_time=9.0, model="other")])
    assert [(s.model, s.step_time, s.num_repeats) for s in found] == [("m", 2.0, 2), ("other", 9.0, 1)]
    assert found[0].spread["step_time"] == [1.0, 3.0]


def test_a_failed_repeat_is_counted_and_its_numbers_are_not() -> None:
    [found] = summarise([run(step_time=1.0), run(step_time=50.0, repeat=1, status="failed", reason="killed")])
    assert (found.status, found.reason, found.num_ok, found.num_repeats) == ("failed", "killed", 1, 2)
    assert found.step_time == 1.0


def test_a_target_that_most_repeats_missed_was_not_reached() -> None:
    missed, reached = run(target_metric="perplexity"), run(target_metric="perplexity", time_to_target=5.0)
    assert summarise([missed, missed, reached])[0].time_to_target is None
    assert summarise([missed, reached, reached])[0].time_to_target == 5.0
    assert "time_to_target" not in summarise([missed, reached, reached])[0].spread


def test_a_prediction_stands_beside_its_measurement_not_among_the_repeats() -> None:
    [found] = summarise([run(step_time=2.0), run(step_time=1.0, kind="predicted", peak_memory=[7])])
    assert (found.step_time, found.num_repeats) == (2.0, 1)
    assert found.predicted == {"step_time": 1.0, "peak_memory": [7]}


def test_efficiency_is_measured_against_single_of_the_same_model() -> None:
    single = run(strategy="single", preset="single", num_devices=1, throughput=10.0)
    other = run(model="other", throughput=10.0)
    found = with_scaling_efficiency([single, run(throughput=15.0), other])
    assert [r.scaling_efficiency for r in found] == [1.0, 0.75, None]


@pytest.mark.parametrize(
    ("values", "unit", "found"),
    [
        ([0.001, 0.2], "s", (1e-3, "ms")),
        ([0.5, 30.0], "s", (1.0, "s")),
        ([500.0], "s", (60.0, "min")),
        ([3 * 2.0**20, None], "B", (2.0**20, "MiB")),
        ([12_000.0], "tokens/s", (1e3, "k tokens/s")),
        ([float("nan")], "samples/s", (1.0, "samples/s")),
        ([2e12], "FLOP/s", (1e12, "TFLOP/s")),
    ],
)
def test_a_column_takes_the_unit_of_its_largest_value(
    values: list[float | None], unit: str, found: tuple[float, str]
) -> None:
    assert common_unit(values, unit) == found

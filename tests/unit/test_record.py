from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from meshwise.record import Record, read_lines, summarise, with_scaling_efficiency, write_lines


def record(**values: Any) -> Record:
    defaults: dict[str, Any] = {
        "model": "gpt2-tiny",
        "data": "stdlib",
        "strategy": "data=2",
        "preset": "data",
        "num_devices": 2,
        "global_batch_size": 16,
        "step_time": 0.5,
        "throughput": 32.0,
    }
    return Record(**(defaults | values))


def test_lines_read_back_as_the_same_records(tmp_path: Path) -> None:
    records = [record(repeat=0, train_losses=[1.0, None]), record(repeat=1, validation={"loss": 2.0})]
    path = tmp_path / "records.jsonl"
    write_lines(path, records[:1])
    write_lines(path, records[1:])
    assert read_lines(path) == records


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_lines(path, [record()])
    with path.open("a") as file:
        file.write(record().model_dump_json()[:40])
    assert read_lines(path) == [record()]


def test_a_record_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="speed"):
        record(speed=1)


def test_summary_is_the_median_and_the_range_of_the_repeats() -> None:
    repeats = [record(repeat=r, step_time=t, peak_memory=[m, 5]) for r, (t, m) in enumerate([(3, 7), (1, 9), (2, 8)])]
    (summary,) = summarise(repeats)
    assert summary.step_time == 2
    assert summary.spread["step_time"] == [1, 3]
    assert summary.peak_memory == [9, 5]
    assert summary.num_repeats == 3
    assert summary.status == "ok"


def test_summary_keeps_strategies_and_device_counts_apart_in_order() -> None:
    records = [record(), record(preset="zero1", strategy="zero=1,data=2"), record(num_devices=4), record(repeat=1)]
    assert [(s.preset, s.num_devices, s.num_repeats) for s in summarise(records)] == [
        ("data", 2, 2),
        ("zero1", 2, 1),
        ("data", 4, 1),
    ]


def test_a_failed_repeat_shows_and_does_not_count() -> None:
    (summary,) = summarise([record(), record(repeat=1, status="failed", reason="rank 1 was killed", step_time=None)])
    assert summary.status == "failed"
    assert summary.reason == "rank 1 was killed"
    assert summary.step_time == 0.5


def test_what_is_unknown_is_not_zero() -> None:
    (summary,) = summarise([record(status="refused", step_time=None, throughput=None)])
    assert summary.step_time is None
    assert summary.throughput is None
    assert summary.spread == {}


def test_scaling_efficiency_is_against_single_on_one_device() -> None:
    one = record(strategy="single", preset="single", num_devices=1, throughput=20.0)
    found = with_scaling_efficiency([one, record(throughput=32.0), record(throughput=None, status="failed")])
    assert [r.scaling_efficiency for r in found] == [1.0, 0.8, None]


def test_without_a_single_device_run_there_is_no_scaling_efficiency() -> None:
    assert with_scaling_efficiency([record()]) == [record()]

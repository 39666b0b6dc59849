"""What is shown while a survey runs."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwise.bench.cells import Cell
from meshwise.cli.progress import Lines, Live, display, finished_line, remaining
from meshwise.record import Record
from meshwise.strategy import Strategy

CELL = Cell(preset="data", strategy=Strategy(data_parallel_size=2), num_devices=2, global_batch_size=8)


def record(**changes: Any) -> Record:
    fixed = {
        "model": "m",
        "data": "d",
        "strategy": "data=2",
        "preset": "data",
        "num_devices": 2,
        "global_batch_size": 8,
    }
    return Record(**{**fixed, **changes})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_one_run(shown: Lines | Live) -> None:
    shown.begin(num_runs=2, folder=Path("out"), notes=("the machine is busy",))
    shown.start(CELL, repeat=0, position=0)
    shown.progress(SimpleNamespace(step=3, num_steps=10, loss=2.5, metric=12.25, seconds=1.0))
    shown.finish(record(step_time=0.25, throughput=1234.4, peak_memory=[1, 2048]))
    shown.end()


def test_a_pipe_gets_one_line_per_finished_run() -> None:
    stream = io.StringIO()
    shown = display(stream)
    show_one_run(shown)
    assert stream.getvalue().splitlines() == [
        "2 runs, kept in out",
        "note: the machine is busy",
        "[1/2] data on 2 devices, repeat 1: ok, 250 ms a step, 1,234 samples/s, peak 2.00 KiB a device",
    ]


def test_a_terminal_gets_bars_and_keeps_the_finished_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    shown = display(stream)
    assert isinstance(shown, Live)
    show_one_run(shown)
    text = stream.getvalue()
    assert "data on 2 devices, repeat 1: ok" in text
    assert "loss 2.5  validation 12.25" in text
    assert "left" in text


def test_a_terminal_survives_the_end_before_the_beginning() -> None:
    Live(Terminal()).end()


def test_a_failed_run_says_why_in_one_line() -> None:
    line = finished_line(record(status="failed", reason="rank 1\nwas killed"), position=2, total=3)
    assert line == "[2/3] data on 2 devices, repeat 1: failed: rank 1 was killed"


def test_what_was_not_measured_is_not_shown() -> None:
    assert finished_line(record(), position=1, total=1) == "[1/1] data on 2 devices, repeat 1: ok"


def test_time_left_grows_with_the_runs_left_and_is_unknown_at_first() -> None:
    assert remaining(10.0, 0, 4) is None
    assert remaining(10.0, 1, 4) == 30.0
    assert remaining(10.0, 4, 4) == 0.0

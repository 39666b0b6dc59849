"""What a survey shows while it runs, on stderr: two live lines in a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from meshwise.bench.cells import Cell
from meshwise.record import Record
from meshwise.units import show

_WHOLE_FROM = 100
"""Rates from here on are shown without decimals."""


def display(stream: TextIO | None = None) -> Lines | Live:
    """The display that suits ``stream`` (stderr if None)."""
    stream = stream or sys.stderr
    return Live(stream) if stream.isatty() else Lines(stream)


def remaining(elapsed: float, done: float, total: int) -> float | None:
    """Seconds left when ``done`` of ``total`` runs (fractions count) took ``elapsed``; None before any is known."""
    return elapsed / done * (total - done) if done > 0 else None


def finished_line(record: Record, *, position: int, total: int) -> str:
    """One finished run in one line: which, how it ended, and its three main numbers or the reason."""
    head = f"[{position}/{total}] {_what(record.preset, record.num_devices, record.repeat)}: {record.status}"
    if record.status not in ("ok", "diverged"):
        return f"{head}: {' '.join(record.reason.split())}"
    parts = [head]
    if record.step_time is not None:
        parts.append(f"{show(record.step_time, 's')} a step")
    if record.throughput is not None:
        parts.append(f"{_rate(record.throughput)} {record.throughput_unit}/s")
    if record.peak_memory:
        parts.append(f"peak {show(max(record.peak_memory), 'B')} a device")
    metric = next((name for name in ("perplexity", "accuracy", "loss") if name in record.validation), None)
    if metric:
        parts.append(f"{metric} {record.validation[metric]:.4g}")
    return ", ".join(parts)


@dataclass(kw_only=True)
class _State:
    """Where the survey stands."""

    total: int = 0
    position: int = 0
    began: float = 0.0


class Lines:
    """For logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._state = stream, _State()

    def begin(self, *, num_runs: int, folder: Path, notes: tuple[str, ...]) -> None:
        self._state = _State(total=num_runs, began=time.monotonic())
        self._say(f"{num_runs} runs, kept in {folder}")
        for note in notes:
            self._say(f"note: {note}")

    def start(self, cell: Cell, *, repeat: int, position: int) -> None:
        self._state.position = position + 1

    def progress(self, progress: Any) -> None:
        pass

    def finish(self, record: Record) -> None:
        self._say(finished_line(record, position=self._state.position, total=self._state.total))

    def end(self) -> None:
        pass

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Live:
    """For terminals: finished runs scroll by above a bar over all runs and a line of the run at work."""

    def __init__(self, stream: TextIO) -> None:
        self._state = _State()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[about]}", markup=False),
            console=Console(file=stream, highlight=False),
            transient=True,
        )
        self._all: TaskID | None = None
        self._run: TaskID | None = None

    def begin(self, *, num_runs: int, folder: Path, notes: tuple[str, ...]) -> None:
        self._state = _State(total=num_runs, began=time.monotonic())
        self._progress.console.print(f"{num_runs} runs, kept in {folder}", markup=False)
        for note in notes:
            self._progress.console.print(f"note: {note}", markup=False)
        self._all = self._progress.add_task("all runs", total=num_runs, about="")
        self._run = self._progress.add_task("", total=None, about="")
        self._progress.start()

    def start(self, cell: Cell, *, repeat: int, position: int) -> None:
        self._state.position = position + 1
        if self._run is not None:
            self._progress.reset(
                self._run,
                total=None,
                description=_what(cell.preset, cell.num_devices, repeat),
                about="starting processes",
            )

    def progress(self, progress: Any) -> None:
        if self._run is None or self._all is None:
            return
        parts = [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
        if progress.metric is not None:
            parts.append(f"validation {progress.metric:.4g}")
        total = progress.num_steps or None
        self._progress.update(self._run, completed=progress.step, total=total, about="  ".join(parts))
        part = progress.step / progress.num_steps if progress.num_steps else 0.0
        self._show_remaining(self._state.position - 1 + part)

    def finish(self, record: Record) -> None:
        line = finished_line(record, position=self._state.position, total=self._state.total)
        self._progress.console.print(line, markup=False)
        if self._all is not None:
            self._progress.update(self._all, completed=self._state.position)
        self._show_remaining(self._state.position)

    def end(self) -> None:
        self._progress.stop()

    def _show_remaining(self, done: float) -> None:
        left = remaining(time.monotonic() - self._state.began, done, self._state.total)
        if self._all is not None and left is not None:
            self._progress.update(self._all, about=f"about {_clock(left)} left")


def _what(preset: str, num_devices: int, repeat: int) -> str:
    return f"{preset} on {num_devices} device{'s' if num_devices > 1 else ''}, repeat {repeat + 1}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

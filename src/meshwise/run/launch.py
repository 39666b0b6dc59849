"""Runs one job to its end in a ``torchrun`` of its own and makes a ``Record`` of it, however it ends.

launch(job) ─► job.json ─► torchrun ─► worker × N ─► rank-K.jsonl ─┐
                              ▲ Watch: progress, trouble, silence ◄┘ ─► stop ─► assemble ─► record.json, trace.json
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwise.errors import OutputError
from meshwise.measure.board import Board
from meshwise.measure.trace import merge_files, rank_name
from meshwise.record import Record
from meshwise.run.assemble import Ending, assemble
from meshwise.run.job import Job
from meshwise.run.rank_files import Event, rank_trace_path
from meshwise.run.watch import LOG, Progress, Watch

__all__ = ["Progress", "launch"]


_SCRATCH = "torchrun"
"""torchrun's own files; it would leave them in the system's temporary folder, run after run."""


def launch(job: Job, *, on_progress: Callable[[Progress], Any] | None = None) -> Record:
    """Trains as ``job`` says and gives its record, which also lies in the job's folder as ``record.json``.

    A run that fails gives a record too: ``status`` "failed", ``reason`` naming rank, step and cause, and all that was
    measured. No process of the run is left when this returns.

    Raises:
        OutputError: the folder holds a run already.
        InputError: TensorBoard is asked for and not installed.
        KeyboardInterrupt: Ctrl-C; the run has been ended and its record, "interrupted", written.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    job_file = job.folder / "job.json"
    if job_file.exists():
        raise OutputError(f"{job.folder} already holds a run; choose another folder or remove it")
    job_file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    began = time.monotonic()
    monitor = _Monitor(job=job, began=began, on_progress=on_progress)
    watch = Watch(job=job, process=_start(job), on_event=monitor.event)
    reason = "the launcher failed"
    status: Any = "failed"
    try:
        reason = watch.follow()
        status = "failed" if reason else "ok"
    except KeyboardInterrupt:
        reason, status = "interrupted by the user", "interrupted"
        raise
    finally:
        watch.stop()
        monitor.close()
        ending = Ending(status=status, reason=reason, wall_time=time.monotonic() - began)
        record = _conclude(job, watch, ending)
    return record


@dataclass(kw_only=True)
class _Monitor:
    """Turns events into progress and, if asked, TensorBoard scalars."""

    job: Job
    began: float
    on_progress: Callable[[Progress], Any] | None

    def __post_init__(self) -> None:
        self._board = Board(self.job.folder / "tensorboard") if self.job.tensorboard else None
        self._steps: dict[int, int] = {}
        self._num_steps = 0
        self._loss: float | None = None
        self._metric: float | None = None
        self._speaker: int | None = None

    def event(self, event: Event) -> None:
        kind, rank = event["event"], event["rank"]
        if kind == "plan":
            self._num_steps = event["num_steps"]
        elif kind == "step":
            self._steps[rank] = event["step"]
            if event["has_loss"] and self._speaker in (None, rank):
                self._speaker, self._loss = rank, event["loss"]
                self._log(event)
        elif kind == "validation" and rank == 0:
            self._metric = event.get("accuracy", event.get("perplexity"))
            self._log(event)
        if kind in ("step", "validation") and self.on_progress is not None:
            self.on_progress(self._progress())

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _log(self, event: Event) -> None:
        if self._board is not None:
            self._board.add(event)

    def _progress(self) -> Progress:
        done = len(self._steps) == self.job.strategy.num_devices
        return Progress(
            step=min(self._steps.values()) if done else 0,
            num_steps=self._num_steps,
            loss=self._loss,
            metric=self._metric,
            seconds=time.monotonic() - self.began,
        )


def _start(job: Job) -> subprocess.Popen[bytes]:
    """torchrun in a session of its own, so that Ctrl-C reaches only the launcher, which then ends it."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(job.strategy.num_devices), "--max-restarts", "0"),
        *("--log-dir", str(job.folder / _SCRATCH)),
        *("-m", "meshwise.run.worker", str(job.folder / "job.json")),
    ]
    with (job.folder / LOG).open("wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **_environment(job)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _environment(job: Job) -> dict[str, str]:
    """What the ranks need to be told before they import torch."""
    from meshwise.run.worker import LAUNCHER_VARIABLE

    settings = {LAUNCHER_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": str(job.threads)}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        settings["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; a host name may not resolve
    return settings


def _conclude(job: Job, watch: Watch, ending: Ending) -> Record:
    shutil.rmtree(job.folder / _SCRATCH, ignore_errors=True)
    _merge_traces(job)
    record = assemble(job, watch.tail.events, ending)
    (job.folder / "record.json").write_text(record.model_dump_json(indent=1), encoding="utf-8")
    return record


def _merge_traces(job: Job) -> None:
    """One timeline of all ranks, if all of them wrote theirs."""
    mesh = job.strategy.mesh
    paths = {rank: rank_trace_path(job.folder, rank) for rank in range(mesh.num_devices)}
    if not all(path.exists() for path in paths.values()):
        return
    sizes = {axis: getattr(mesh, axis) for axis in ("pipeline", "data", "tensor")}
    names = {
        rank: rank_name(rank, {axis: at for axis, at in mesh.coordinates(rank).items() if sizes[axis] > 1})
        for rank in paths
    }
    merge_files(paths, names, job.folder / "trace.json")
    for path in paths.values():
        path.unlink()

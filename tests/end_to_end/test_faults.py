"""Runs that go wrong, for real: each ends in time, says who, when and why, and keeps what it measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshwise.record import Record
from meshwise.run.job import Job
from meshwise.run.launch import Progress, launch
from meshwise.strategy import parse

LIMIT = 15.0
"""Seconds from noticing trouble to the end of the last process, as promised."""

FAULTY_CALL = 4
"""The training step in which rank 1 does what its model is named after."""

MODELS = f"""
import os
import signal
import sys
import time

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256)
        self.fault = fault
        self.calls = 0

    def forward(self, ids):
        logits = self.head(self.embedding(ids))
        if self.training:
            self.calls += 1
            if RANK == 1 and self.calls == {FAULTY_CALL}:
                return self.fault(logits)
        return logits


def kill_me(logits):
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error(logits):
    raise ValueError("this model is broken")


def sleep_forever(logits):
    time.sleep(3600)  # the line to be named


def take_too_much(logits):
    return torch.empty(2**46)


def give_nan(logits):
    return logits * float("nan")


def leave(logits):
    os._exit(7)


def nothing(logits):
    return logits


def model_of(fault):
    def build():
        return Net(fault)

    build.task = {{"kind": "language", "sequence_length": 16, "num_classes": 256}}
    return build


killed, raises, hangs, swells, diverges, leaves, works = map(
    model_of, (kill_me, raise_error, sleep_forever, take_too_much, give_nan, leave, nothing)
)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    record: Record
    seconds_to_end: float
    """From the last thing a rank wrote before the fault to the return of ``launch``."""
    progress: list[Progress]


@pytest.fixture
def make_job(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    strategy = parse("data").at(2)

    def make(model: str, **changes: Any) -> Job:
        values = {
            "model": f"{tmp_path}/models.py:{model}",
            "data": f"text:{tmp_path}/text.txt",
            "strategy": strategy,
            "preset": "data",
            "folder": tmp_path / "run",
            "global_batch_size": 8,
            "num_steps": 8,
            "untimed_steps": 1,
            "evaluate_every": 2,
            "validation_samples": 16,
            "device": "cpu",
            "watchdog": 30.0,
        }
        return Job(**{**values, **changes})

    return make


def run(job: Job) -> Outcome:
    progress: list[Progress] = []
    record = launch(job, on_progress=progress.append)
    ended = time.time()
    assert left_behind(job.folder) == []
    assert Record.model_validate_json((job.folder / "record.json").read_text()) == record
    written = [path.stat().st_mtime for path in job.folder.glob("rank-*.heartbeat")]
    return Outcome(record=record, seconds_to_end=ended - max(written), progress=progress)


def left_behind(folder: Path) -> list[psutil.Process]:
    """Processes that still run for the job in ``folder``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if str(folder / "job.json") in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def assert_kept(record: Record) -> None:
    """What was measured before the fault is there."""
    assert record.status == "failed"
    assert record.num_steps == FAULTY_CALL - 1
    assert len(record.step_times) == FAULTY_CALL - 2  # the first is not timed
    assert [point.step for point in record.curve] == [0, 2]


def test_a_killed_rank_is_named_with_its_signal(make_job):
    job = make_job("killed")
    outcome = run(job)
    assert outcome.record.reason.startswith("rank 1 was killed by signal 9 (SIGKILL) in step 4")
    assert outcome.seconds_to_end < LIMIT
    assert_kept(outcome.record)
    assert outcome.progress[-1].step == FAULTY_CALL - 1 and outcome.progress[-1].num_steps == 8


def test_a_hung_rank_is_named_with_its_line(make_job):
    outcome = run(make_job("hangs", watchdog=4.0))
    line = next(number for number, text in enumerate(MODELS.splitlines(), 1) if "the line to be named" in text)
    assert outcome.record.reason.startswith("rank 1 made no progress for")
    assert f"in step 4 (forward) at models.py:{line} in sleep_forever" in outcome.record.reason
    assert outcome.seconds_to_end < 4.0 + LIMIT
    assert_kept(outcome.record)


def test_a_loss_that_is_no_number_ends_the_run_as_diverged(make_job):
    outcome = run(make_job("diverges"))
    assert outcome.record.status == "diverged"
    assert "step 4" in outcome.record.reason
    assert [loss is None for loss in outcome.record.train_losses[:4]] == [False, False, False, True]
    assert [point.step for point in outcome.record.curve] == [0, 2]
    assert len(outcome.record.peak_memory) == 2


@pytest.mark.slow
def test_an_exception_is_named_with_its_line_and_message(make_job):
    outcome = run(make_job("raises"))
    assert outcome.record.reason.startswith("rank 1 raised ValueError in step 4 (forward) at models.py:")
    assert outcome.record.reason.endswith("in raise_error: this model is broken")
    assert outcome.seconds_to_end < LIMIT
    assert_kept(outcome.record)


@pytest.mark.slow
def test_running_out_of_memory_is_called_that(make_job):
    outcome = run(make_job("swells"))
    assert outcome.record.reason.startswith("rank 1 ran out of memory in step 4 (forward) at models.py:")
    assert outcome.seconds_to_end < LIMIT
    assert_kept(outcome.record)


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_with_its_exit_code(make_job):
    outcome = run(make_job("leaves"))
    assert outcome.record.reason.startswith("rank 1 ended with exit code 7 in step 4")
    assert outcome.seconds_to_end < LIMIT
    assert_kept(outcome.record)


@pytest.mark.slow
def test_a_run_that_works_measures_everything(make_job):
    job = make_job("works", num_steps=6, tensorboard=True, target=("perplexity", 1e9))
    record = run(job).record
    assert (record.status, record.reason) == ("ok", "")
    assert len(record.step_times) == 5 and record.throughput_unit == "tokens"
    assert record.throughput == pytest.approx(8 * 16 / record.step_time)
    parameters = 256 * 16 + 16 * 256 + 256
    assert record.parameters == parameters
    assert record.communication == {"all_reduce": 4.0 * parameters}
    assert [memory.parameters for memory in record.memory] == [4 * parameters] * 2
    assert [point.step for point in record.curve] == [0, 2, 4, 6]
    assert record.time_to_target == 0.0
    assert (job.folder / "trace.json").exists() and list((job.folder / "tensorboard").iterdir())


LAUNCHER = """
import sys
from pathlib import Path

from meshwise.run.job import Job
from meshwise.run.launch import launch

launch(Job.model_validate_json(Path(sys.argv[1]).read_text()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed launcher"])
def test_no_rank_outlives_its_launcher(make_job, tmp_path, number):
    job = make_job("hangs", watchdog=600.0)
    (tmp_path / "ask.json").write_text(job.model_dump_json())
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(tmp_path / "ask.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_step(job.folder, FAULTY_CALL)
        launcher.send_signal(number)
        launcher.wait(timeout=LIMIT)
        deadline = time.monotonic() + LIMIT
        while left_behind(job.folder) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left_behind(job.folder) == []
    finally:
        launcher.kill()
    assert not (job.folder / "torchrun").exists() or number == signal.SIGKILL
    if number == signal.SIGINT:
        record = Record.model_validate_json((job.folder / "record.json").read_text())
        assert record.status == "interrupted" and record.num_steps == FAULTY_CALL - 1


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_torchrun(make_job):
    job = make_job("hangs", watchdog=600.0)

    def kill_torchrun(progress: Progress) -> None:
        if progress.step == FAULTY_CALL - 1:
            for process in psutil.Process().children():
                if "torch.distributed.run" in process.cmdline():
                    process.kill()

    record = launch(job, on_progress=kill_torchrun)
    assert left_behind(job.folder) == []
    assert record.reason.startswith("torchrun itself was ended by signal 9 (SIGKILL)")
    assert_kept(record)


def wait_for_step(folder: Path, step: int) -> None:
    """Until every rank has come to ``step``."""
    from meshwise.run.rank_files import read_beat

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = [read_beat(folder, rank) for rank in range(2)]
        if all(beat is not None and beat.step >= step for beat in beats):
            return
        time.sleep(0.1)
    raise AssertionError(f"the ranks never came to step {step}")

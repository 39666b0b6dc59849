"""When silence becomes a hang, and when a dead launcher is told from a dead rank; no processes are needed to know."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwise.run.job import Job
from meshwise.run.rank_files import RankWriter
from meshwise.run.watch import Watch
from meshwise.strategy import parse


def watch_over(folder: Path, *, watchdog: float = 10.0, returncode: int | None = None) -> tuple[Watch, list[Any]]:
    """A watch over two ranks whose torchrun has ended with ``returncode`` (None: it runs)."""
    strategy = parse("data").at(2)
    assert strategy is not None
    job = Job(
        model="m",
        data="d",
        strategy=strategy,
        preset="data",
        folder=folder,
        global_batch_size=8,
        watchdog=watchdog,
    )
    process: Any = SimpleNamespace(pid=os.getpid(), returncode=returncode, poll=lambda: returncode)
    events: list[Any] = []
    return Watch(job=job, process=process, on_event=events.append), events


def test_a_rank_is_hung_when_its_heartbeat_stands_still_for_the_watchdogs_time(tmp_path):
    writers = [RankWriter(tmp_path, rank) for rank in range(2)]
    for writer in writers:
        writer.beat(3, "step")
    watch, _ = watch_over(tmp_path)
    assert watch._stalled(100.0) == {}
    assert watch._stalled(109.0) == {}
    writers[0].beat(4, "step")
    assert watch._stalled(109.5) == {}
    assert watch._stalled(111.0) == {0: pytest.approx(1.5), 1: pytest.approx(11.0)}


def test_before_the_first_step_a_rank_may_take_a_minute(tmp_path):
    for rank in range(2):
        RankWriter(tmp_path, rank).beat(0, "imports")
    watch, _ = watch_over(tmp_path)
    assert watch._stalled(100.0) == {}
    assert watch._stalled(159.0) == {}
    assert set(watch._stalled(161.0)) == {0, 1}


def test_a_rank_that_never_came_is_missed(tmp_path):
    RankWriter(tmp_path, 0).beat(0, "groups")
    watch, _ = watch_over(tmp_path)
    assert watch._stalled(100.0) == {}
    assert set(watch._stalled(161.0)) == {0, 1}


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    writers = [RankWriter(tmp_path, rank) for rank in range(2)]
    for writer in writers:
        writer.beat(9, "trace")
    writers[0].event("end")
    watch, events = watch_over(tmp_path)
    watch._read()
    assert [event["event"] for event in events] == ["end"]
    watch._stalled(100.0)
    assert set(watch._stalled(111.0)) == {1}


def test_all_ranks_ended_is_a_good_end_whatever_torchrun_says(tmp_path):
    for rank in range(2):
        RankWriter(tmp_path, rank).event("end")
    assert watch_over(tmp_path, returncode=1)[0].follow() == ""


def test_a_killed_torchrun_is_not_blamed_on_a_rank(tmp_path):
    RankWriter(tmp_path, 0).beat(3, "step")
    assert watch_over(tmp_path, returncode=-9)[0].follow().startswith("torchrun itself was ended by signal 9 (SIGKILL)")


def test_a_torchrun_that_cannot_start_shows_its_last_line(tmp_path):
    (tmp_path / "torchrun.log").write_text("ModuleNotFoundError: No module named 'torch'\n")
    assert "No module named 'torch'" in watch_over(tmp_path, returncode=1)[0].follow()


def test_a_rank_that_is_gone_without_a_word_is_noticed(tmp_path):
    writer = RankWriter(tmp_path, 1)
    writer.event("start", pid=2**22 + 1)  # above the largest process id there is
    watch, _ = watch_over(tmp_path)
    watch._read()
    assert watch._vanished() == (1,)

"""``meshwise survey`` as people run it: the installed command, real torchrun, real training."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

MESHWISE = str(Path(sys.executable).with_name("meshwise"))
SMALL = ["--data", "stdlib", "--train-samples", "2048", "--validation-samples", "64", "--sequence-length", "32"]
ISSUE_KEYS = {
    "strategy",
    "num_devices",
    "status",
    "global_batch_size",
    "step_time",
    "epoch_time",
    "throughput",
    "peak_memory",
    "communication",
    "validation",
    "curve",
    "time_to_target",
    "predicted",
}


def meshwise(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MESHWISE, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=200)


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that still work on ``folder``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and process.pid != os.getpid():
            found.append(line)
    return found


def wait_for(condition: Callable[[], bool], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def test_a_survey_from_the_command_line_to_the_report(tmp_path: Path) -> None:
    steps = ["--steps", "6", "--untimed-steps", "2", "--target-metric", "validation_loss=100"]
    strategies = ["--strategies", "data", "zero2", "--devices", "1,2"]
    done = meshwise("survey", "gpt2-tiny", *SMALL, *strategies, *steps, "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    records = {(r["preset"], r["num_devices"]): r for r in shown["records"]}
    assert set(records) == {("single", 1), ("data", 2), ("zero2", 2)}
    for record in records.values():
        check_record(record)
    check_same_start(list(records.values()))
    zero2, data = records["zero2", 2], records["data", 2]
    assert sum(m["optimizer_state"] for m in zero2["memory"]) < sum(m["optimizer_state"] for m in data["memory"])
    check_folder(tmp_path / "out", num_records=3)
    assert len([line for line in done.stderr.splitlines() if line.startswith("[")]) == 3
    assert left_over(tmp_path) == []

    again = meshwise("survey", "gpt2-tiny", "--out", "out", cwd=tmp_path)
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (2, "", 1)
    assert "use --out out-2, or --replace" in again.stderr

    rebuilt = meshwise("report", "out", "--out", "other.html", cwd=tmp_path)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert "zero2" in rebuilt.stdout
    assert (tmp_path / "other.html").stat().st_size > 0


def check_record(record: dict[str, Any]) -> None:
    assert set(record) >= ISSUE_KEYS
    assert record["status"] == "ok", record["reason"]
    assert record["global_batch_size"] == 32
    assert record["step_time"] > 0 and record["epoch_time"] > 0 and record["throughput"] > 0
    assert len(record["peak_memory"]) == record["num_devices"] and min(record["peak_memory"]) > 0
    for rank in record["memory"]:
        parts = ("parameters", "gradients", "optimizer_state", "activations", "other")
        assert sum(rank[part] for part in parts) == rank["peak"]
    assert bool(record["communication"]) == (record["num_devices"] > 1)
    assert record["validation"]["perplexity"] > 1
    assert [point["step"] for point in record["curve"]][0 :: len(record["curve"]) - 1] == [0, 6]
    assert record["curve"][-1]["validation_loss"] < record["curve"][0]["validation_loss"]
    assert record["time_to_target"] is not None  # any loss is below 100
    assert record["predicted"] is None


def check_same_start(records: list[dict[str, Any]]) -> None:
    """The same initial weights and the same validation samples, whatever the strategy."""
    starts = [record["curve"][0]["validation_loss"] for record in records]
    assert starts == pytest.approx([starts[0]] * len(starts), rel=1e-5)


def check_folder(out: Path, *, num_records: int) -> None:
    assert len((out / "records.jsonl").read_text().splitlines()) == num_records
    assert json.loads((out / "survey.json").read_text())["status"] == "finished"
    with closing(sqlite3.connect(out / "index.sqlite")) as connection:
        rows = connection.execute("select preset, scaling_efficiency from records").fetchall()
    assert len(rows) == num_records
    assert dict(rows)["single"] == 1.0
    assert "<html" in (out / "report.html").read_text()
    for run in (out / "runs").iterdir():
        names = {path.name for path in run.iterdir()}
        assert names >= {"job.json", "rank-0.jsonl", "record.json", "torchrun.log", "trace.json"}, run


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["survey", "gpt2-tiny", "--strategies", "tensor", "--devices", "3"], "which tensor=3 does not divide; use"),
        (["survey", "gpt2-tiny", "--data", "digits"], "takes text"),
        (["run", "gpt2-tini"], "did you mean 'gpt2-tiny'?"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path: Path, arguments: list[str], answer: str) -> None:
    done = meshwise(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("meshwise: ") and done.stderr.count("\n") == 1
    assert answer in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_process_and_a_usable_record(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ["run", "gpt2-tiny", *SMALL, "--strategy", "data=2", "--steps", "100000", "--out", str(out), "--json"]
    with subprocess.Popen(
        [MESHWISE, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert wait_for(lambda: training(out), seconds=90)
            process.send_signal(signal.SIGINT)
            shown, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert told.endswith("meshwise: interrupted\n")
    content = json.loads(shown)
    assert content["interrupted"] is True
    assert [record["status"] for record in content["records"]] == ["interrupted"]
    assert wait_for(lambda: left_over(out) == [], seconds=5), left_over(out)
    assert json.loads((out / "survey.json").read_text())["status"] == "interrupted"
    assert (out / "records.jsonl").read_text().count("\n") == 1


def training(out: Path) -> bool:
    """Whether both ranks have taken a few steps."""
    beats = list(out.glob("runs/*/rank-*.heartbeat"))
    steps = [json.loads(text)["step"] for beat in beats if (text := beat.read_text().strip())]
    return len(steps) == 2 and min(steps) > 3

"""Starts the processes of one comparison and reads what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 1500.0
"""Seconds for one comparison; DeepSpeed's first run on a machine compiles for minutes."""

_TAIL_LINES = 25


class ComparisonError(Exception):
    """A comparison that gave no result, with the end of what its processes said."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure, and with which interpreter."""

    python: str = sys.executable
    num_ranks: int = 2
    num_rounds: int = 9
    steps: int = 3


def check_interpreter(python: str) -> str:
    """What is wrong with ``python`` as the interpreter of the ranks; empty if nothing."""
    try:
        tried = subprocess.run(
            [python, "-c", "import torch, meshwise"], capture_output=True, text=True, env=_environment(), check=False
        )
    except OSError as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def run_comparison(name: str, case: str, plan: Plan) -> dict[str, Any]:
    """What ``rank.compare`` returned on rank 0.

    Raises:
        ComparisonError: a rank failed or time ran out.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        arguments = ["--comparison", name, "--case", case, "--rounds", plan.num_rounds, "--steps", plan.steps]
        command = [plan.python, "-m", "executors_lib.rank", *map(str, arguments), "--out", str(out)]
        port = _free_port()
        with log.open("w", encoding="utf-8") as stream:
            ranks = [
                subprocess.Popen(
                    command,
                    env=_environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=plan.num_ranks, MASTER_PORT=port),
                    stdout=stream,
                    stderr=stream,
                )
                for rank in range(plan.num_ranks)
            ]
            trouble = _wait(ranks)
        if trouble or not out.exists():
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            raise ComparisonError(f"{name} on {case}: {trouble or 'no result'}\n{tail}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def _wait(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Waits for all; if one fails, or time runs out, ends the others and says so."""
    deadline = time.monotonic() + TIME_LIMIT
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [number for number, code in enumerate(codes) if code]
            if failed:
                return f"rank {failed[0]} ended with exit code {codes[failed[0]]}"
            if None not in codes:
                return ""
            if time.monotonic() > deadline:
                return f"no result after {TIME_LIMIT:.0f} s"
            time.sleep(0.2)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def _environment(**values: object) -> dict[str, str]:
    paths = [str(ROOT / "benchmarks"), str(ROOT / "src")]
    fixed = {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
    }
    return {**os.environ, **fixed, **{key: str(value) for key, value in values.items()}}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""One rank: ``torchrun … -m meshwise.run.worker JOB.json``.

It says at once that it lives, then imports torch; it ends with everything written, by ``os._exit``: taking a process
group down in order now and then aborts a rank that has finished its work (seen with gloo in 7 of 26 runs).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.errors import InputError, MeshwiseError
from meshwise.run.job import Job
from meshwise.run.rank_files import RankWriter, stacks_path
from meshwise.run.stacks import of_exception, phase_of, users_frame

if TYPE_CHECKING:
    import torch

LAUNCHER_VARIABLE = "MESHWISE_LAUNCHER"
"""Environment: process id of the launcher, which a rank does not outlive."""

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|gloo.*timeout|recvvalue|"
    r"remote process|ncclremote|application closed|aborted",
    re.IGNORECASE,
)
_GRACE = 2.0
"""Seconds a rank that only lost its peers waits, so that the launcher sees first who is to blame."""

_KEPT_FRAMES = 8


def main() -> None:
    """Runs the job named on the command line on this rank, and does not return."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    writer = RankWriter(job.folder, rank)
    writer.beat(0, "imports")
    writer.event("start", pid=os.getpid(), coordinates=job.strategy.mesh.coordinates(rank))
    die_with_parents()
    _answer_signals(job.folder, rank)
    code = 0
    try:
        _run(job, writer, local_rank=local_rank)
        writer.event("end")
    except BaseException as error:
        code = _report(error, writer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cause_of(error: BaseException) -> str:
    """``out of memory``, ``peer`` (the connection to another rank broke), ``input`` (the user's) or ``error``."""
    text, name = str(error), type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return "out of memory"
    if isinstance(error, InputError):
        return "input"
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(text):
        return "out of memory"
    if name.startswith("Dist") or (isinstance(error, RuntimeError) and _PEER.search(text)):
        return "peer"
    return "error"


def _run(job: Job, writer: RankWriter, *, local_rank: int) -> None:
    import torch
    import torch.distributed as dist

    from meshwise.run.train import train

    torch.set_num_threads(job.threads)
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
    if job.strategy.precision == "fp64":
        torch.set_default_dtype(torch.float64)
    device = _device(job, local_rank)
    writer.beat(0, "groups")
    if job.strategy.num_devices > 1:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            timeout=timedelta(seconds=3 * job.watchdog + 60),
            device_id=None if device.type == "cpu" else device,
        )
    train(job, device=device, writer=writer)


def _device(job: Job, local_rank: int) -> torch.device:
    import torch

    if job.device == "cpu":
        return torch.device("cpu")
    available = torch.cuda.device_count()
    if available >= job.strategy.num_devices:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if job.device == "cuda":
        raise InputError(
            f"{job.strategy} needs {job.strategy.num_devices} CUDA devices and {available} are there; "
            "use fewer devices or device cpu"
        )
    return torch.device("cpu")


def _report(error: BaseException, writer: RankWriter) -> int:
    """Writes what happened; the exit code."""
    stack = of_exception(error)
    frame = users_frame(stack)
    cause = cause_of(error)
    writer.event(
        "error",
        step=writer.step,
        phase=phase_of(stack, writer.phase),
        type=type(error).__name__,
        message=str(error)[:2000] or "no message",
        cause=cause,
        where=f"{frame.place} in {frame.function}" if frame else "",
        traceback=[f"{one.file}:{one.line} in {one.function}" for one in stack[-_KEPT_FRAMES:]],
    )
    sys.excepthook(type(error), error, error.__traceback__)
    if cause == "peer":
        time.sleep(_GRACE)
    return error.exit_code if isinstance(error, MeshwiseError) else 1


def _answer_signals(folder: Path, rank: int) -> None:
    """SIGUSR1 writes the stacks of all threads to a file; a crash in native code writes them to the log."""
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        file = stacks_path(folder, rank).open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def die_with_parents() -> None:
    """Ends this process when torchrun or the launcher is gone: the kernel does so on Linux, and a watching thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER_VARIABLE, "0"))

    def watch() -> None:
        while os.getppid() == parent and (not launcher or _alive(launcher)):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="meshwise-parents").start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()

"""Reads Python stacks: whose line it is, which part of a step, and whether the rank is only waiting for others."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_OWN = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, kw_only=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def is_users(self) -> bool:
        """Neither meshwise, nor an installed package, nor the standard library, nor made up (``<string>``)."""
        return not self.file.startswith(("<", _OWN, *_LIBRARIES))


Stack = Sequence[Frame]
"""Innermost frame last, as in a traceback."""


def parse_dump(text: str) -> Stack:
    """The stack of the thread that trains, from the last of ``faulthandler``'s dumps; empty if there is none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread ")):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(file=match["file"], line=int(match["line"]), function=match["function"]))
    ours = [list(reversed(frames)) for frames in threads if any(_is_worker(frame) for frame in frames)]
    return ours[-1] if ours else []


def of_exception(error: BaseException) -> Stack:
    """Where ``error`` was raised."""
    summary = traceback.extract_tb(error.__traceback__)
    return [Frame(file=frame.filename, line=frame.lineno or 0, function=frame.name) for frame in summary]


def users_frame(stack: Stack) -> Frame | None:
    """The innermost line of the user's own code."""
    return next((frame for frame in reversed(stack) if frame.is_users), None)


def phase_of(stack: Stack, default: str) -> str:
    """``forward``, ``backward`` or ``update`` where the stack shows it, else ``default``."""
    if default != "step":
        return default
    for frame in reversed(stack):
        if frame.function == "_engine_run_backward":
            return "backward"
        if "/torch/optim/" in frame.file.replace("\\", "/"):
            return "update"
    return "forward" if any(frame.function == "_call_impl" for frame in stack) else default


def waits_for_others(stack: Stack) -> bool:
    """Whether the innermost frame is a collective, or the autograd engine, inside which DDP waits for its own."""
    if not stack:
        return False
    innermost, file = stack[-1], stack[-1].file.replace("\\", "/")
    inside = ("/torch/distributed/", "/torch/_ops.py", "/meshwise/run/collectives", "/meshwise/run/point_to_point")
    return innermost.function == "_engine_run_backward" or any(part in file for part in inside)


def _is_worker(frame: Frame) -> bool:
    return frame.file.replace("\\", "/").endswith("meshwise/run/worker.py") and frame.function == "main"

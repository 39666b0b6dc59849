"""What a rank leaves behind while it runs, and how others read it: events as JSON lines, and a heartbeat.

rank-K.jsonl       {"event", "rank", "time", …}: start, plan, step, validation, memory, communication, error, end
rank-K.heartbeat   {"step", "phase", "time"}, overwritten; ``step`` counts from 1, 0 is before the first
rank-K.stacks      Python stacks, when the launcher asked for them
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_BEAT_SIZE = 128


def events_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.heartbeat"


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"


def rank_trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.trace.json"


class RankWriter:
    """Writes one rank's events and heartbeats; every line is on its way to disk when ``event`` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.step = 0
        self.phase = "start"
        self._events = events_path(folder, rank).open("w", encoding="utf-8", buffering=1)
        self._beat = os.open(heartbeat_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def event(self, kind: str, **fields: Any) -> None:
        """One line; numbers that are not finite become null."""
        line = {"event": kind, "rank": self.rank, "time": time.time(), **fields}
        self._events.write(json.dumps(_plain(line), separators=(",", ":")) + "\n")

    def beat(self, step: int, phase: str) -> None:
        """Says that this rank has come to ``phase`` of ``step`` (some microseconds)."""
        self.step, self.phase = step, phase
        text = json.dumps({"step": step, "phase": phase, "time": round(time.time(), 3)})
        os.pwrite(self._beat, text.ljust(_BEAT_SIZE).encode(), 0)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last heartbeat of a rank."""

    step: int
    phase: str
    time: float


def read_beat(folder: Path, rank: int) -> Beat | None:
    """None before the first heartbeat."""
    try:
        return Beat(**json.loads(heartbeat_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclass
class Tail:
    """Follows the event files of all ranks; ``events`` holds what has been read, by rank."""

    folder: Path
    num_ranks: int
    events: dict[int, list[Event]] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)

    def read(self) -> list[Event]:
        """Events written since the last call; a line without its end waits for the next one."""
        fresh = []
        for rank in range(self.num_ranks):
            for line in self._lines(rank):
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:  # a rank that died in the middle of a line
                    continue
                self.events.setdefault(rank, []).append(event)
                fresh.append(event)
        return fresh

    def _lines(self, rank: int) -> list[bytes]:
        try:
            with events_path(self.folder, rank).open("rb") as file:
                file.seek(self._offsets.get(rank, 0))
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offsets[rank] = self._offsets.get(rank, 0) + len(whole)
        return whole.splitlines()


def last_event(events: list[Event], kind: str) -> Event | None:
    """The last event of ``kind``, None if there is none."""
    return next((event for event in reversed(events) if event["event"] == kind), None)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value

"""Follows a running job from outside: progress, trouble, silence; and ends all its processes when it must."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from meshwise.run.failure import Evidence, exit_codes, explain, explain_hang, signal_name
from meshwise.run.job import Job
from meshwise.run.rank_files import Beat, Event, Tail, last_event, read_beat, stacks_path
from meshwise.run.stacks import Stack, parse_dump

LOG = "torchrun.log"

_POLL = 0.1
_LOOK = 0.5
"""Seconds between looks at heartbeats and processes."""

_LAST_WORDS = 5.0
"""Seconds between the first sign of trouble and the end: time for torchrun to say which rank failed, and how."""

_FAREWELL = 10.0
"""Seconds torchrun gets to end by itself after every rank has."""

_LEAST_START = 60.0
"""Seconds a rank gets at least for each phase before the first step: imports and data take what they take."""

_STACKS = 2.0
_GONE = 5.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: steps done, of ``num_steps``.
        loss: training loss of that step, None while no rank has reported it.
        metric: newest validation perplexity or accuracy.
        seconds: since the start.
    """

    step: int
    num_steps: int
    loss: float | None
    metric: float | None
    seconds: float


@dataclass(kw_only=True)
class Watch:
    """One run under way. ``process`` is torchrun, the leader of a session of its own."""

    job: Job
    process: subprocess.Popen[bytes]
    on_event: Callable[[Event], None]
    began: float = field(default_factory=time.monotonic)
    _pids: set[int] = field(default_factory=set)
    _beats: dict[int, tuple[Beat | None, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_ranks = self.job.strategy.num_devices
        self.tail = Tail(self.job.folder, self.num_ranks)
        self._kills_before = out_of_memory_kills()

    def follow(self) -> str:
        """Watches until the run is over, one way or the other; why it failed, empty if it did not."""
        trouble: float | None = None
        ended: float | None = None
        looked = 0.0
        while True:
            self._read()
            now = time.monotonic()
            if self.process.poll() is not None:
                return self._verdict()
            if ended is None and self._all_ended():
                ended = now
            if ended is not None and now - ended > _FAREWELL:
                return ""
            if now - looked >= _LOOK:
                looked = now
                if trouble is None and ended is None and (self._any_error() or self._vanished()):
                    trouble = now
                stalled = self._stalled(now) if trouble is None and ended is None else {}
                if stalled:
                    return explain_hang(self._evidence(stalled, stacks=self._ask_stacks()), watchdog=self.job.watchdog)
            if trouble is not None and now - trouble > _LAST_WORDS:
                return explain(self._evidence())
            time.sleep(_POLL)

    def _verdict(self) -> str:
        """Why torchrun, which is gone, left before all ranks had ended; empty if it did not."""
        self._read()
        code = self.process.returncode
        if self._all_ended():
            return ""
        if code < 0:
            return f"torchrun itself was ended by signal {-code} ({signal_name(-code)}), and its ranks with it"
        return explain(self._evidence())

    def stop(self) -> None:
        """Ends every process of the run that is left, and waits until they are gone."""
        with _undisturbed():
            known = self._descendants()
            # Ranks first: torchrun then clears up after itself and ends within a moment.
            ranks = [process for process in known if process.pid != self.process.pid]
            _kill(ranks)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_GONE if ranks else 0.0)
            _kill([*self._descendants(), *known])
            self.process.wait()
            self._read()

    def _read(self) -> None:
        for event in self.tail.read():
            if event["event"] == "start":
                self._pids.add(event["pid"])
            self.on_event(event)

    def _all_ended(self) -> bool:
        events = self.tail.events
        return len(events) == self.num_ranks and all(last_event(one, "end") for one in events.values())

    def _any_error(self) -> bool:
        return any(last_event(events, "error") for events in self.tail.events.values())

    def _vanished(self) -> tuple[int, ...]:
        """Ranks that started, are no longer there, and said nothing of their end."""
        gone = []
        for rank, events in sorted(self.tail.events.items()):
            start = last_event(events, "start")
            if start and not _running(start["pid"]) and not last_event(events, "end"):
                self._read()
                if not last_event(events, "end") and not last_event(events, "error"):
                    gone.append(rank)
        return tuple(gone)

    def _stalled(self, now: float) -> dict[int, float]:
        """Seconds of silence by rank, of all ranks still at work, if one of them has been silent for too long."""
        silence, too_long = {}, False
        for rank in range(self.num_ranks):
            if last_event(self.tail.events.get(rank, []), "end"):
                continue
            beat = read_beat(self.job.folder, rank)
            before = self._beats.get(rank)
            if before is None or before[0] != beat:
                self._beats[rank] = before = (beat, now)
            silence[rank] = now - before[1]
            starting = beat is None or beat.step == 0
            too_long |= silence[rank] > (max(self.job.watchdog, _LEAST_START) if starting else self.job.watchdog)
        return silence if too_long else {}

    def _ask_stacks(self) -> dict[int, Stack]:
        """Stacks of the ranks that answer."""
        for rank, events in self.tail.events.items():
            start = last_event(events, "start")
            if start and _running(start["pid"]) and stacks_path(self.job.folder, rank).exists():
                with contextlib.suppress(OSError):
                    psutil.Process(start["pid"]).send_signal(signal.SIGUSR1)
        time.sleep(_STACKS)
        stacks = {}
        for rank in self.tail.events:
            with contextlib.suppress(OSError):
                stacks[rank] = parse_dump(stacks_path(self.job.folder, rank).read_text(encoding="utf-8"))
        return stacks

    def _evidence(self, stalled: dict[int, float] | None = None, *, stacks: dict[int, Stack] | None = None) -> Evidence:
        log = _text(self.job.folder / LOG)
        beats = {rank: beat for rank in range(self.num_ranks) if (beat := read_beat(self.job.folder, rank))}
        return Evidence(
            events=self.tail.events,
            beats=beats,
            exit_codes=exit_codes(log),
            vanished=self._vanished(),
            stacks=stacks or {},
            stalled=stalled or {},
            out_of_memory_kills=out_of_memory_kills() - self._kills_before,
            log=log,
        )

    def _descendants(self) -> list[psutil.Process]:
        """torchrun, everything it started, and the ranks it may have left behind."""
        roots = [self.process.pid, *self._pids]
        found: dict[int, psutil.Process] = {}
        for pid in roots:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if pid != self.process.pid and not _is_ours(process, self.job):
                    continue
                found[pid] = process
                found.update({child.pid: child for child in process.children(recursive=True)})
        return list(found.values())


def out_of_memory_kills() -> int:
    """Processes the kernel has killed for want of memory since it started; 0 where it does not say."""
    for line in _text(Path("/proc/vmstat")).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_GONE)


def _is_ours(process: psutil.Process, job: Job) -> bool:
    """Whether a process id still belongs to this job and has not been given to another process."""
    return str(job.folder / "job.json") in process.cmdline()


def _running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.Error:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not interrupt the clearing up after the first."""
    try:
        before: Any = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which Ctrl-C does not reach
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

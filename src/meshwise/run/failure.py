"""What went wrong, in one sentence: from the traces a failed run leaves, which rank is to blame, where and why.

    killed (SIGKILL) ≻ raised on its own ≻ crashed by a signal ≻ ended with a code ≻ lost its peers

When one rank dies, the others fail too: their connections break, the launcher ends them. The order above tells the
cause from its effects; among equals, the earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.run.rank_files import Beat, Event, last_event
from meshwise.run.stacks import Stack, phase_of, users_frame, waits_for_others

_FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_LISTED = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)")

_OTHER_EXIT = {signal.SIGTERM: "torchrun ends the others so", signal.SIGABRT: "gloo's answer to a lost peer"}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known when a run has ended badly, by rank.

    Attributes:
        exit_codes: as torchrun reports them; negative is the signal that killed the rank.
        vanished: ranks whose process is gone, who neither ended nor raised and whose exit code nobody knows.
        stacks: of the ranks that were asked, if it hung.
        stalled: seconds since the last heartbeat, if it hung.
        out_of_memory_kills: how many processes the kernel killed for memory while it ran.
        log: the launcher's output.
    """

    events: Mapping[int, list[Event]]
    beats: Mapping[int, Beat]
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    vanished: tuple[int, ...] = ()
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    stalled: Mapping[int, float] = field(default_factory=dict)
    out_of_memory_kills: int = 0
    log: str = ""


def exit_codes(log: str) -> dict[int, int]:
    """Exit codes by rank from torchrun's output, on one node."""
    codes = {int(rank): int(code) for code, rank in _FIRST.findall(log)}
    codes.update({int(rank): int(code) for rank, code in _LISTED.findall(log)})
    return codes


def signal_name(number: int) -> str:
    """As ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def explain(evidence: Evidence) -> str:
    """One sentence naming the rank, the step and the cause."""
    killed = [rank for rank, code in sorted(evidence.exit_codes.items()) if code == -signal.SIGKILL]
    if killed:
        return _killed(evidence, killed[0])
    errors = [event for events in evidence.events.values() if (event := last_event(events, "error"))]
    errors.sort(key=lambda event: event["time"])
    own = [event for event in errors if event["cause"] != "peer"]
    if own:
        return _raised(own[0])
    crashed = [rank for rank, code in sorted(evidence.exit_codes.items()) if code < 0 and -code not in _OTHER_EXIT]
    if crashed:
        return _crashed(evidence, crashed[0])
    silent = {rank: code for rank, code in sorted(evidence.exit_codes.items()) if rank not in _ranks(errors)}
    if silent:
        rank = min(silent, key=lambda item: (silent[item] < 0, item))
        return _crashed(evidence, rank) if silent[rank] < 0 else _ended(evidence, rank, silent[rank])
    if evidence.vanished:
        return (
            f"rank {evidence.vanished[0]} vanished {_when(evidence, evidence.vanished[0])} without a word; {_SEE_LOG}"
        )
    return _raised(errors[0]) if errors else _nothing_known(evidence)


def explain_hang(evidence: Evidence, *, watchdog: float) -> str:
    """Names the rank that the others wait for: not itself waiting, least far, longest silent."""
    rank = culprit(evidence)
    stack = evidence.stacks.get(rank, ())
    beat = evidence.beats.get(rank)
    if beat is None:
        return (
            f"rank {rank} did not start within {evidence.stalled[rank]:.0f} s; see torchrun.log in the run's folder, "
            "or give it more time with a larger watchdog"
        )
    frame = users_frame(stack) or (stack[-1] if stack else None)
    where = f" at {frame.place} in {frame.function}" if frame else "; it does not even answer a signal"
    return (
        f"rank {rank} made no progress for {evidence.stalled[rank]:.0f} s "
        f"{_place(beat.step, phase_of(stack, beat.phase))}{where} (watchdog {watchdog:g} s); "
        "if a step may take that long, use a larger watchdog"
    )


def culprit(evidence: Evidence) -> int:
    """The hung rank: among those whose stack does not show them waiting, the least advanced and longest silent."""

    def suspicion(rank: int) -> tuple[bool, bool, int, float]:
        stack, beat = evidence.stacks.get(rank, ()), evidence.beats.get(rank)
        users = bool(stack) and stack[-1].is_users
        step = beat.step if beat else -1
        return waits_for_others(stack), not users, step, -evidence.stalled[rank]

    return min(sorted(evidence.stalled), key=suspicion)


_SEE_LOG = "see torchrun.log in the run's folder"


def _killed(evidence: Evidence, rank: int) -> str:
    if evidence.out_of_memory_kills:
        why = "the kernel ran out of memory and chose it; use smaller micro-batches, checkpointing or a ZeRO stage"
    else:
        why = "out of memory, or someone's kill -9"
    return f"rank {rank} was killed by signal 9 (SIGKILL) {_when(evidence, rank)}: {why}"


def _crashed(evidence: Evidence, rank: int) -> str:
    number = -evidence.exit_codes[rank]
    return f"rank {rank} was ended by signal {number} ({signal_name(number)}) {_when(evidence, rank)}; {_SEE_LOG}"


def _ended(evidence: Evidence, rank: int, code: int) -> str:
    return f"rank {rank} ended with exit code {code} {_when(evidence, rank)}; {_SEE_LOG}"


def _raised(event: Event) -> str:
    rank, message = event["rank"], " ".join(event["message"].split())
    where = _place(event["step"], event["phase"]) + (f" at {event['where']}" if event["where"] else "")
    if event["cause"] == "input":
        return message
    if event["cause"] == "out of memory":
        remedy = "use smaller micro-batches, checkpointing or a ZeRO stage"
        return f"rank {rank} ran out of memory {where}: {message}; {remedy}"
    if event["cause"] == "peer":
        return f"rank {rank} lost its peers {where}: {message}; {_SEE_LOG}"
    return f"rank {rank} raised {event['type']} {where}: {message}"


def _nothing_known(evidence: Evidence) -> str:
    lines = [line for line in evidence.log.splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if lines else ""
    when = "before the training ended" if evidence.events else "before any rank started"
    return f"torchrun ended {when}{last}; {_SEE_LOG}"


def _when(evidence: Evidence, rank: int) -> str:
    beat = evidence.beats.get(rank)
    return _place(beat.step, beat.phase) if beat else "before it started"


def _place(step: int, phase: str) -> str:
    if step < 1:
        return f"before the first step ({phase})"
    return f"in step {step}" + (f" ({phase})" if phase != "step" else "")


def _ranks(events: list[Event]) -> set[int]:
    return {event["rank"] for event in events}

"""One timeline of all ranks: the profiler's Chrome traces, thinned out and laid on one clock. Opens in Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwise.units import convert

KEPT = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime")
"""Categories of events worth showing; memory events, arrows and the profiler's own bookkeeping are left out."""

SHORTEST = 5.0
"""Operators of fewer µs are left out: four of five in number, nothing to see at the scale of a step."""

_HIDDEN = ("ProfilerStep", "PyTorch Profiler")


def compact(trace: dict[str, Any]) -> dict[str, Any]:
    """What a profiler's trace comes to on disk: ``{"base": ns since the epoch, "events": [...]}``, times in µs."""
    main = _main_thread(trace["traceEvents"])
    threads: dict[Any, int] = {main: 0}
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in KEPT or event["name"].startswith(_HIDDEN):
            continue
        if event["cat"] == "cpu_op" and event.get("dur", 0.0) < SHORTEST:
            continue
        thread = threads.setdefault(event["tid"], len(threads))
        events.append([event["name"], event["cat"], thread, event["ts"], event.get("dur", 0.0)])
    return {"base": int(trace.get("baseTimeNanoseconds", 0)), "events": events}


def merge(traces: dict[int, dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """One Chrome trace of the compact traces by rank; ``names`` are shown as process names. Time 0: the first."""
    starts = {rank: [_time(trace, event[3]) for event in trace["events"]] for rank, trace in traces.items()}
    zero = min((min(times) for times in starts.values() if times), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        events += _metadata(rank, names.get(rank, f"rank {rank}"), {event[2] for event in trace["events"]})
        for (name, category, thread, _, duration), start in zip(trace["events"], starts[rank]):
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": category,
                    "pid": rank,
                    "tid": thread,
                    "ts": round(start - zero, 3),
                    "dur": round(duration, 3),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge_files(paths: dict[int, Path], names: dict[int, str], target: Path) -> None:
    """Merges the compact traces at ``paths`` (by rank) into ``target``."""
    traces = {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in paths.items()}
    target.write_text(json.dumps(merge(traces, names), separators=(",", ":")), encoding="utf-8")


def rank_name(rank: int, coordinates: dict[str, int]) -> str:
    """``rank 3 (pipeline 1, data 1)``; axes of one device are for the caller to leave out."""
    place = ", ".join(f"{axis} {index}" for axis, index in coordinates.items())
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def _time(trace: dict[str, Any], microseconds: float) -> float:
    """µs since the epoch, which the ranks of one machine share."""
    return convert(trace["base"], "ns", "µs") + microseconds


def _main_thread(events: Sequence[dict[str, Any]]) -> Any:
    """The thread that runs the step: the one with the most events."""
    counts: dict[Any, int] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            counts[event["tid"]] = counts.get(event["tid"], 0) + 1
    return max(counts, key=lambda thread: counts[thread], default=None)


def _metadata(rank: int, name: str, threads: set[int]) -> list[dict[str, Any]]:
    def entry(kind: str, thread: int, **values: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": values}

    named = [entry("thread_name", thread, name="step" if thread == 0 else f"thread {thread}") for thread in threads]
    return [entry("process_name", 0, name=name), entry("process_sort_index", 0, sort_index=rank), *named]

"""Runs a step under torch's profiler and gives back its Chrome trace, memory events included."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwise.measure.clock import synchronise
from meshwise.measure.memory import HeldBytes, analyse, from_trace
from meshwise.record import RankMemory


def profiled(action: Callable[[], None], *, device: torch.device) -> dict[str, Any]:
    """The Chrome trace of ``action``. Times inside it are longer than without a profiler; their order is real."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        action()
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))


def memory_of(trace: dict[str, Any], *, device: torch.device, held: HeldBytes, before: int | None) -> RankMemory:
    """Peak of the step in ``trace``; ``before`` as ``allocated`` gave it just before the step."""
    index = -1 if device.type == "cpu" else device.index or 0
    allocations, ranges = from_trace(trace["traceEvents"], device_index=index)
    found = analyse(allocations, ranges, held=held, allocated_before=before)
    if device.type != "cuda":
        return found
    peak = torch.cuda.max_memory_allocated(device)  # the allocator's own count, since ``allocated`` was asked
    return found.model_copy(update={"peak": peak, "other": found.other + peak - found.peak})


def allocated(device: torch.device) -> int | None:
    """Bytes the allocator of ``device`` has given out, from where its peak counts anew; the CPU's keeps no count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)

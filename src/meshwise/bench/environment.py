"""Where a survey ran: what its numbers depend on and a reader cannot see in them."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("meshwise", "torch", "torchvision", "transformers", "numpy", "scikit-learn")
_BUSY_SHARE = 0.5
_MAX_PROCESSES_PER_CORE = 8


def describe() -> dict[str, Any]:
    """Versions, processor, memory (B) and load of this machine, as JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "processor": _processor(),
        "num_cores": num_cores(),
        "memory": psutil.virtual_memory().total,
        "accelerators": _accelerators(),
        "load_average": list(os.getloadavg()),
    }


def num_cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def notes(environment: dict[str, Any], devices: tuple[int, ...], threads: int) -> list[str]:
    """What makes the times of this survey less trustworthy, each as one sentence."""
    cores, load, found = environment["num_cores"], environment["load_average"][0], []
    if load > _BUSY_SHARE * cores:
        found.append(f"the machine is busy (load {load:.1f} on {cores} cores): times will scatter")
    if environment["accelerators"]:
        return found
    most = max(devices)
    if most > _MAX_PROCESSES_PER_CORE * cores:
        found.append(f"{most} processes on {cores} cores will spend their time waiting for each other")
    elif most * threads > cores:
        found.append(
            f"{most} processes × {threads} threads share {cores} cores: times on {most} devices show the method's "
            "overhead, not its speed-up"
        )
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

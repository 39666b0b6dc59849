"""Time of training steps: the device is waited for, so that what is timed has really happened."""

from __future__ import annotations

import time
from types import TracebackType

import torch


def synchronise(device: torch.device) -> None:
    """Waits until ``device`` has done all it was asked to; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Adds up the seconds spent inside its ``with`` blocks.

    Attributes:
        last: seconds of the block that ended last.
        total: seconds of all blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.last = 0.0
        self.total = 0.0
        self._device = device
        self._start = 0.0

    def __enter__(self) -> Stopwatch:
        synchronise(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # a failed device must not be waited for
            return
        synchronise(self._device)
        self.last = time.perf_counter() - self._start
        self.total += self.last

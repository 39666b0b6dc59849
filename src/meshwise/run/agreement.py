"""What all ranks must know of each other beside the training itself, over a gloo group of their own.

Whether every loss is finite is asked without waiting: the answer to step k is read after step k+2, by every rank at the
same point, so that all stop together and an asynchronous pipeline is not drained by the question.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LAG = 2


class Agreement:
    """Sums and finiteness over all ranks. Without a process group, one rank agrees with itself."""

    def __init__(self, timeout: timedelta) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._pending: deque[tuple[int, torch.Tensor, dist.Work | None]] = deque()

    def report(self, step: int, *, finite: bool) -> int | None:
        """Says how this rank's ``step`` went; the first step that was not finite anywhere, once all must know of it."""
        flag = torch.tensor([0 if finite else 1], dtype=torch.int32)
        work = dist.all_reduce(flag, group=self._group, async_op=True) if self._group is not None else None
        self._pending.append((step, flag, work))
        return self._settle(keep=LAG if self._group is not None else 0)

    def settle(self) -> int | None:
        """Waits for all answers still out; the first step that was not finite anywhere."""
        return self._settle(keep=0)

    def sums(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total.tolist()

    def _settle(self, *, keep: int) -> int | None:
        while len(self._pending) > keep:
            step, flag, work = self._pending.popleft()
            if work is not None:
                work.wait()
            if flag.item():
                return step
        return None

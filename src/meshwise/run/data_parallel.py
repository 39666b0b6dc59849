"""Data parallel: torch's DistributedDataParallel over the data axis [Li et al. 2020].

Gradients lie in buckets that are all-reduced while backward still runs; every rank holds everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwise.run.collectives import Group, all_reduce_coalesced
from meshwise.run.executor import OptimizerFactory
from meshwise.run.replication import GradientPart, Named, Replica
from meshwise.run.zero import BUCKET_BYTES

# torch 2.14 renamed the option that keeps DDP from broadcasting buffers before every forward.
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class DataParallel(Replica):
    """``modules`` are wrapped in DDP; buffers stay each replica's own (see ``batch_norm``)."""

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, group: Group, replicas: int
    ) -> None:
        super().__init__(parts, named, optimizer, replicas=replicas)
        self.wrapped = [
            DistributedDataParallel(part, process_group=group, gradient_as_bucket_view=True, **_NO_BUFFERS)
            for part in parts
        ]
        self.modules = list(self.wrapped)

    def before_micro_batch(self, *, last: bool) -> None:
        # What DDP.no_sync() sets: gradients accumulate until the last micro-batch of the step.
        for module in self.wrapped:
            module.require_backward_grad_sync = last


class ReducedAtEnd(Replica):
    """Data parallel for schedules that hold several stages a device: gradients are all-reduced after all backwards.

    torch's interleaved schedules finish gradients of FSDP modules and never those of DDP modules (torch 2.11 to 2.14),
    so DDP would leave replicas apart.
    """

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, group: Group, replicas: int
    ) -> None:
        super().__init__(parts, named, optimizer, replicas=replicas)
        self.group = group

    def finish(self) -> list[GradientPart]:
        gradients = super().finish()
        bucket: list[Tensor] = []
        size = 0
        for part in gradients:
            bucket.append(part.tensor)
            size += part.tensor.numel() * part.tensor.element_size()
            if size >= BUCKET_BYTES:
                all_reduce_coalesced(bucket, self.group)
                bucket, size = [], 0
        all_reduce_coalesced(bucket, self.group)
        for part in gradients:
            part.tensor.div_(self.replicas)
        return gradients

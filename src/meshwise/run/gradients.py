"""What is left to do with gradients after the data axis has averaged them: sums over the tensor axis and over tied
stages, and the global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.run.collectives import Group, all_reduce_coalesced
from meshwise.run.groups import Groups
from meshwise.run.replication import GradientPart


def sum_parts(parts: Sequence[GradientPart], groups: Groups, *, tied_group: Group | None) -> None:
    """Adds up what ranks of the tensor group, and stages with tied weights, each hold a summand of; in place."""
    partial = [part.tensor for part in parts if part.kind.partial]
    if partial and groups.size("tensor") > 1:
        all_reduce_coalesced(partial, groups.group("tensor"))
    tied = [part.tensor for part in parts if part.kind.tied]
    if tied and tied_group is not None:
        all_reduce_coalesced(tied, tied_group)


def global_norm(parts: Sequence[GradientPart], groups: Groups) -> Tensor:
    """Euclidean norm of the whole model's gradient: every element once, however many ranks hold it."""
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for part in parts:
        total += torch.linalg.vector_norm(part.tensor).double() ** 2 / part.copies
    if groups.mesh.num_devices > 1:
        dist.all_reduce(total)
    return total.sqrt()


def clip(parts: Sequence[GradientPart], norm: Tensor, largest: float) -> None:
    """Scales gradients in place so that their global norm is at most ``largest``."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.tensor.mul_(factor.to(part.tensor.dtype))

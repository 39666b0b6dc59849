"""Whole parameters from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.run.groups import Groups
from meshwise.strategy.shard import Layout, part_ranges


def gather_state(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], groups: Groups) -> dict[str, Tensor]:
    """Collects on rank 0, on CPU, what the first data replica holds. Collective; empty on other ranks.

    Args:
        tensors: original name → this rank's tensor, whole over the data axis.
        layouts: how names are split over the tensor axis; names not listed are whole.
    """
    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()} if groups.index("data") == 0 else {}
    if groups.mesh.num_devices == 1:
        return {name: tensor.clone() for name, tensor in own.items()}
    gathered: list[dict[str, Tensor]] | None = (
        [{} for _ in range(groups.mesh.num_devices)] if groups.rank == 0 else None
    )
    dist.gather_object(own, gathered, dst=0)
    if gathered is None:
        return {}
    pieces: dict[str, list[Tensor]] = {}
    for rank in range(groups.mesh.num_devices):
        for name, tensor in gathered[rank].items():
            pieces.setdefault(name, []).append(tensor)
    return {name: merge(parts, layouts.get(name, Layout())) for name, parts in pieces.items()}


def merge(parts: list[Tensor], layout: Layout) -> Tensor:
    """The whole tensor from its parts in tensor-rank order (the first of them, where all are alike)."""
    if layout.dim is None or len(parts) == 1:
        return parts[0].clone()
    shape = list(parts[0].shape)
    shape[layout.dim] = layout.full_size
    whole = parts[0].new_empty(shape)
    for index, part in enumerate(parts):
        indices = [i for r in part_ranges(layout, index, len(parts)) for i in r]
        whole.index_copy_(layout.dim, torch.tensor(indices, dtype=torch.long), part)
    return whole

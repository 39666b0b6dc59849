"""ZeRO stage 3 [Rajbhandari et al. 2020]: torch's FSDP2, ``fully_shard`` over the data axis.

Parameters, gradients and optimizer state are kept as 1/N; a block's parameters are gathered before its forward, freed
after, gathered again before its backward, and its gradients reduce-scattered after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshwise.run.chain import blocks_of
from meshwise.run.executor import OptimizerFactory
from meshwise.run.replication import GradientPart, Named, Replica

MAX_BLOCKS = 16
"""Small neighbouring layers are gathered together: at most about this many gathers a pass."""


class FullySharded(Replica):
    """``mesh`` is the one-dimensional data mesh."""

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, mesh: DeviceMesh
    ) -> None:
        names = {id(parameter): name for name, parameter in named.parameters.items()}
        where = [
            (module, key, names[id(parameter)])
            for part in parts
            for module in part.modules()
            for key, parameter in module.named_parameters(recurse=False)
        ]
        for part in parts:
            for block in _units(part):
                fully_shard(block, mesh=mesh)
            fully_shard(part, mesh=mesh)
        # FSDP2 puts sharded parameters in the places of the whole ones.
        sharded = {name: getattr(module, key) for module, key, name in where}
        super().__init__(parts, Named(parameters=sharded, kinds=named.kinds), optimizer)

    def finish(self) -> list[GradientPart]:
        return [replace(part, tensor=_local(part.tensor)) for part in super().finish()]

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in super().whole_parameters():
            yield name, parameter.full_tensor()  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _units(part: nn.Module) -> list[list[nn.Module]]:
    """Consecutive blocks that are gathered together; tied parameters are left to the root, as FSDP2 asks."""
    owners: dict[int, int] = {}
    for module in part.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    blocks = [block for block in blocks_of(part) if any(True for _ in block.parameters())]
    blocks = [block for block in blocks if all(owners[id(p)] == 1 for p in block.parameters())]
    if len(blocks) < 2:
        return []
    total = sum(p.numel() for p in part.parameters())
    units: list[list[nn.Module]] = []
    size = 0
    for block in blocks:
        if not units or size >= total / MAX_BLOCKS:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(p.numel() for p in block.parameters())
    # A small rest, such as a last norm, is not worth a gather of its own: the root's takes it along.
    return units if size >= total / MAX_BLOCKS else units[:-1]

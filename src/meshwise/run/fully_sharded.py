"""ZeRO stage 3 [Rajbhandari et al. 2020]: torch's FSDP2, ``fully_shard`` over the data axis.

Parameters, gradients and optimizer state are kept as 1/N; a block's parameters are gathered before its forward, freed
after, gathered again before its backward, and its gradients reduce-scattered after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshwise.run.chain import blocks_of
from meshwise.run.executor import Held, OptimizerFactory
from meshwise.run.replication import GradientPart, Named, state_bytes, total_bytes, trainable

MAX_BLOCKS = 16
"""Small neighbouring layers are gathered together: at most about this many gathers a pass."""


class FullySharded:
    """``mesh`` is the one-dimensional data mesh."""

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, mesh: DeviceMesh
    ) -> None:
        self.modules = list(parts)
        self.kinds = dict(named.kinds)
        names = {id(parameter): name for name, parameter in named.parameters.items()}
        where = [
            (m, key, names[id(p)])
            for part in parts
            for m in part.modules()
            for key, p in m._parameters.items()
            if p is not None
        ]
        for part in parts:
            for block in _units(part):
                fully_shard(block, mesh=mesh)
            fully_shard(part, mesh=mesh)
        self.parameters = {name: getattr(module, key) for module, key, name in where}
        self.optimizer = optimizer(trainable(self.parameters.values()))

    def begin(self, num_micro_batches: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def before_micro_batch(self, *, last: bool) -> None:
        pass

    def finish(self) -> list[GradientPart]:
        return [
            GradientPart(tensor=_local(p.grad), kind=self.kinds[name], copies=self.kinds[name].copies)
            for name, p in self.parameters.items()
            if p.grad is not None
        ]

    def update(self) -> None:
        self.optimizer.step()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.detach().full_tensor()  # type: ignore[attr-defined]

    def held(self) -> Held:
        parameters = list(self.parameters.values())
        return Held(
            parameters=total_bytes(parameters),
            gradients=total_bytes(p.grad for p in parameters if p.grad is not None),
            optimizer_state=state_bytes(self.optimizer),
        )

    def release_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


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

"""Process groups: a ``Mesh`` laid over the ranks of an initialised ``torch.distributed``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwise.errors import StrategyError
from meshwise.strategy import AXES, Mesh


@dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's place in the mesh and the groups it talks in. An axis of size 1 has no group and never talks."""

    mesh: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None

    def size(self, axis: str) -> int:
        return int(getattr(self.mesh, axis))

    def index(self, axis: str) -> int:
        """This rank's coordinate on ``axis``."""
        return self.mesh.coordinates(self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along ``axis``; only for axes of size 2 or more."""
        if self.device_mesh is None:
            raise StrategyError(f"axis {axis!r} has size 1 and no group; check size({axis!r}) first")
        return self.device_mesh.get_group(axis)

    def ranks(self, axis: str) -> tuple[int, ...]:
        return self.mesh.group(axis, self.rank)


def build_groups(mesh: Mesh, device: torch.device) -> Groups:
    """Creates the groups of ``mesh``; without a process group only a mesh of one device can be.

    Raises:
        StrategyError: the mesh and the number of processes differ.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.num_devices != world_size:
        raise StrategyError(
            f"the strategy needs {mesh.num_devices} processes and {world_size} are running; start it with "
            f"torchrun --nproc-per-node {mesh.num_devices}"
        )
    if world_size == 1:
        return Groups(mesh=mesh, rank=0, device=device, device_mesh=None)
    device_mesh = init_device_mesh(device.type, mesh.shape, mesh_dim_names=AXES)
    return Groups(mesh=mesh, rank=dist.get_rank(), device=device, device_mesh=device_mesh)

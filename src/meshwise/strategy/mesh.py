"""A mesh: ranks on named axes.

Axis order is outermost first, ``pipeline × data × tensor``: the ranks of a tensor group are neighbours (they talk
most), the stages of a pipeline are farthest apart (they talk least).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes; rank = ((pipeline · |data|) + data) · |tensor| + tensor."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on every axis."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis left out counts as 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share every other coordinate with ``rank``, in order along ``axis``."""
        position = self.coordinates(rank)
        return tuple(self.rank(**{**position, axis: index}) for index in range(getattr(self, axis)))

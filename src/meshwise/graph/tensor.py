"""What lies on the edges of a graph: one storage each. Views have no tensor of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwise.errors import GraphError, did_you_mean

_DTYPES_BY_SIZE = (
    (8, "float64 int64"),
    (4, "float32 int32"),
    (2, "bfloat16 float16 int16"),
    (1, "float8 int8 uint8 bool"),
)
ELEMENT_SIZES: Mapping[str, int] = MappingProxyType(
    {dtype: size for size, dtypes in _DTYPES_BY_SIZE for dtype in dtypes.split()}
)
"""Bytes of one element."""

ROLES = ("input", "parameter", "buffer", "activation", "saved")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One storage: what a forward pass reads, makes or keeps.

    Attributes:
        name: unique in its graph.
        shape: of the whole storage; a consumer may look at a part or another arrangement of it.
        role: ``input`` (fed by the user), ``parameter``, ``buffer``, ``activation`` (made by an operator and read by
            others), ``saved`` (made by an operator only for its own backward: masks, statistics, indices).
        count: how many there are; above 1 inside a repeated block.

    Raises:
        GraphError: an unknown dtype or role, or a negative size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: str = "activation"
    count: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_SIZES:
            raise GraphError(
                f"dtype {self.dtype!r} of {self.name} is unknown; {did_you_mean(self.dtype, ELEMENT_SIZES)}"
            )
        if self.role not in ROLES:
            raise GraphError(f"role {self.role!r} of {self.name} is unknown; {did_you_mean(self.role, ROLES)}")
        if min(self.shape, default=0) < 0 or self.count < 1:
            raise GraphError(
                f"{self.name} has shape {self.shape} × {self.count}; sizes are 0 or more, counts 1 or more"
            )

    @property
    def num_elements(self) -> int:
        """Of one of ``count``."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of one of ``count``."""
        return self.num_elements * ELEMENT_SIZES[self.dtype]

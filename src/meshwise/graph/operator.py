"""One operator of a forward pass, with what its backward will need and do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise.graph.flop import KINDS, MATRIX_KINDS, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator: ``outputs = kind(inputs, parameters)``.

    Attributes:
        name: unique in its graph; starts with the module's path.
        kind: a key of ``flop.KINDS``.
        module: dotted path of the module that called it; ``""`` for the model itself.
        inputs, outputs: names of tensors on the edges, in the order of the call.
        parameters: names of the parameters it reads.
        attributes: the arguments of ``flop.KINDS[kind]``: sizes, never tensors.
        read_bytes, written_bytes: what forward reads (inputs and parameters, only the part looked at) and writes.
        backward_read_bytes, backward_written_bytes: the same for both gradients together.
        saved: tensors autograd keeps for this operator's backward; several operators may keep the same one.
        input_gradient, weight_gradient: whether backward computes them (no gradient flows into pixels).
        count: how many there are; above 1 inside a repeated block.
    """

    name: str
    kind: str
    module: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    backward_read_bytes: int = 0
    backward_written_bytes: int = 0
    saved: tuple[str, ...] = ()
    input_gradient: bool = True
    weight_gradient: bool = True
    count: int = 1

    @property
    def work(self) -> Work:
        """FLOP and depth of one of ``count``, a gradient that is not computed counting nothing."""
        whole = KINDS[self.kind](**self.attributes)
        return whole.only(input_gradient=self.input_gradient, weight_gradient=self.weight_gradient)

    @property
    def is_matrix(self) -> bool:
        """Whether its FLOP are what MFU counts: products of matrices."""
        return self.kind in MATRIX_KINDS

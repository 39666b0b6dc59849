"""What data parallelism, ZeRO and plain replicas have in common: how the copies of a model part stay one model.

A part is what this rank holds after tensor and pipeline splits. A replication wraps it for forward and backward,
brings gradients together over the data axis, and updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwise.errors import StrategyError
from meshwise.run.executor import Held, OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class GradientKind:
    """What is left to do with a gradient after backward, and how often it is held.

    Attributes:
        copies: ranks that hold the same finished gradient, data axis left out; a global norm counts each once.
        partial: a summand over the tensor axis (sequence-parallel layers).
        tied: a summand over the stages that share the weight.
    """

    copies: int = 1
    partial: bool = False
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientPart:
    """A finished gradient tensor (1-D shard or whole), its kind, and how many ranks of the world hold the same."""

    tensor: Tensor
    kind: GradientKind
    copies: int


@dataclass(frozen=True, kw_only=True)
class Named:
    """Parameters of the parts under their original names, with what is to be done with each gradient."""

    parameters: Mapping[str, nn.Parameter]
    kinds: Mapping[str, GradientKind]


class Replication(Protocol):
    modules: list[nn.Module]
    optimizer: torch.optim.Optimizer

    def begin(self, num_micro_batches: int) -> None:
        """Starts a step: gradients are empty from here; that many backwards follow."""
        ...

    def before_micro_batch(self, *, last: bool) -> None:
        """Called before each forward outside a pipeline."""
        ...

    def finish(self) -> list[GradientPart]:
        """Gradients averaged over the data axis, when all backwards are done."""
        ...

    def update(self) -> None:
        """Optimizer step, and parameters made whole where the strategy keeps them whole."""
        ...

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Original name and parameter, whole over the data axis. Collective."""
        ...

    def held(self) -> Held: ...

    def release_gradients(self) -> None: ...


class Replica:
    """No data axis: the parts as they are. Also the base of replications that keep every parameter whole."""

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, replicas: int = 1
    ) -> None:
        self.modules = list(parts)
        self.named = named
        self.replicas = replicas
        self.optimizer = optimizer(trainable(named.parameters.values()))

    def begin(self, num_micro_batches: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def before_micro_batch(self, *, last: bool) -> None:
        pass

    def finish(self) -> list[GradientPart]:
        return [
            GradientPart(
                tensor=p.grad, kind=self.named.kinds[name], copies=self.named.kinds[name].copies * self.replicas
            )
            for name, p in self.named.parameters.items()
            if p.grad is not None
        ]

    def update(self) -> None:
        self.optimizer.step()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.parameters.items():
            yield name, parameter.detach()

    def held(self) -> Held:
        parameters = list(self.named.parameters.values())
        return Held(
            parameters=total_bytes(parameters),
            gradients=total_bytes(p.grad for p in parameters if p.grad is not None),
            optimizer_state=state_bytes(self.optimizer),
        )

    def release_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Distinct parameters that need gradients.

    Raises:
        StrategyError: there is none.
    """
    distinct = list({id(p): p for p in parameters if p.requires_grad}.values())
    if not distinct:
        raise StrategyError("a part of the model has no trainable parameter on this rank; use fewer pipeline stages")
    return distinct


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors`` (a local part of a distributed tensor counts as what it is)."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state; step counters (one element) count too."""
    return total_bytes(v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))

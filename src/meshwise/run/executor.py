"""What every strategy looks like from outside: the executor, and the values it takes and gives.

A training loop needs to know nothing else:

    executor = parallelize(module, strategy, loss=…, optimizer=…)
    for inputs, targets in batches:            # the part of the global batch that belongs to this data replica
        result = executor.step(inputs, targets)
    executor.flush()                           # asynchronous pipelines: let the batches still in flight finish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwise.run.groups import Groups
from meshwise.strategy import Strategy

Loss = Callable[[Any, Tensor], Tensor]
"""``loss(outputs, targets)``: a scalar, the mean over the samples (or tokens) given."""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """``loss``: detached mean over this replica's samples; None on ranks that do not hold the last stage."""

    loss: Tensor | None
    gradient_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Sums over this replica's samples, so that they add up over batches and replicas."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_correct: int = 0

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(
            loss_sum=self.loss_sum + other.loss_sum,
            num_targets=self.num_targets + other.num_targets,
            num_correct=self.num_correct + other.num_correct,
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes this rank holds between steps (gradients: at the end of backward), by what they are."""

    parameters: int
    gradients: int
    optimizer_state: int
    weight_versions: int = 1


class Executor(Protocol):
    """One strategy at work on one rank. Every method is called by all ranks, in the same order."""

    strategy: Strategy
    groups: Groups

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Forward, backward and update on this replica's ``local_batch_size`` samples (batch is dim 0)."""
        ...

    def flush(self) -> None:
        """Finishes what is in flight; nothing to do for synchronous strategies."""
        ...

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Evaluation | None:
        """Loss and accuracy in evaluation mode; None on ranks without the last stage. Call ``flush`` first."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Whole parameters and buffers under the original module's names, on CPU, on rank 0; empty elsewhere."""
        ...

    def held(self) -> Held: ...

    def release_gradients(self) -> None:
        """Drops what is left of the last step's gradients, so that the next step starts from what is held for good."""
        ...


def evaluate_outputs(outputs: Tensor, targets: Tensor, loss: Tensor) -> Evaluation:
    """``outputs`` logits ``[…, classes]``, ``targets`` class numbers ``[…]``, ``loss`` their mean."""
    correct = 0
    if outputs.shape[:-1] == targets.shape:
        correct = int((outputs.argmax(-1) == targets).sum())
    return Evaluation(loss_sum=float(loss) * targets.numel(), num_targets=targets.numel(), num_correct=correct)

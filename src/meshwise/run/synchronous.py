"""Synchronous strategies without a pipeline: forward and backward of every micro-batch, then one update.

Also what a flushed pipeline shares with them: finishing gradients, clipping, updating, state, evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshwise.run.batch_norm import average_running_statistics
from meshwise.run.collectives import Group
from meshwise.run.executor import Evaluation, Held, Loss, StepResult, evaluate_outputs
from meshwise.run.gradients import clip, global_norm, sum_parts
from meshwise.run.groups import Groups
from meshwise.run.replication import Replication
from meshwise.run.state import gather_state
from meshwise.strategy import Strategy
from meshwise.strategy.shard import Layout
from meshwise.zoo.losses import logits_of


@dataclass(frozen=True, kw_only=True)
class Built:
    """What ``parallelize`` made of the module, for an executor to work with.

    Attributes:
        parts: this rank's modules, unwrapped (one per virtual stage).
        names: per part, its parameter and buffer names → names in the original module.
        layouts: original name → how it is split over the tensor axis.
        loss: of the last part's outputs; evaluation uses it too.
        tied_group: ranks that hold tied copies, or None.
        outputs_whole: whether logits are whole on this rank (accuracy can be counted).
    """

    strategy: Strategy
    groups: Groups
    parts: Sequence[nn.Module]
    names: Sequence[Mapping[str, str]]
    layouts: Mapping[str, Layout]
    replication: Replication
    loss: Loss
    tied_group: Group | None
    outputs_whole: bool
    clip_norm: float


class Synchronous:
    """Base: all ranks update together with exact gradients of the whole batch."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.strategy, self.groups = built.strategy, built.groups
        self.replication = built.replication
        self.optimizer = built.replication.optimizer
        self.notes: list[str] = []

    def flush(self) -> None:
        """Nothing is ever in flight."""

    def finish_step(self) -> Tensor | None:
        """Finishes gradients and updates; the gradient norm where clipping needs it."""
        built = self.built
        parts = self.replication.finish()
        sum_parts(parts, self.groups, tied_group=built.tied_group)
        norm = None
        if built.clip_norm > 0:
            norm = global_norm(parts, self.groups)
            clip(parts, norm, built.clip_norm)
        with record_function("meshwise.update"):
            self.replication.update()
        return norm

    def prepare_evaluation(self) -> None:
        if self.groups.size("data") > 1:
            for part in self.built.parts:
                average_running_statistics(part, self.groups.group("data"))

    def evaluation(self, outputs: Tensor, targets: Tensor) -> Evaluation:
        loss = self.built.loss(outputs, targets)
        if self.built.outputs_whole:
            return evaluate_outputs(logits_of(outputs), targets, loss)
        return Evaluation(loss_sum=float(loss) * targets.numel(), num_targets=targets.numel())

    def state(self) -> dict[str, Tensor]:
        self.prepare_evaluation()
        tensors = dict(self.replication.whole_parameters())
        for part, names in zip(self.built.parts, self.built.names):
            tensors.update({names[key]: buffer for key, buffer in part.named_buffers() if key in names})
        return gather_state(tensors, self.built.layouts, self.groups)

    def held(self) -> Held:
        return self.replication.held()

    def release_gradients(self) -> None:
        self.replication.release_gradients()


class Accumulate(Synchronous):
    """One part per rank: micro-batches one after the other, gradients accumulated."""

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        count = self.strategy.num_micro_batches
        module = self.replication.modules[0]
        self.replication.begin(count)
        losses = []
        for index, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count))):
            self.replication.before_micro_batch(last=index == count - 1)
            with record_function("meshwise.forward"):
                loss = self.built.loss(module(x), y) / count
            with record_function("meshwise.backward"):
                loss.backward()
            losses.append(loss.detach())
            del loss
        norm = self.finish_step()
        return StepResult(loss=torch.stack(losses).sum(), gradient_norm=norm)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Evaluation:
        self.prepare_evaluation()
        with evaluation_mode(self.built.parts):
            # The unwrapped part: replicas may hold different numbers of samples, and DDP has nothing to do here.
            return self.evaluation(self.built.parts[0](inputs), targets)


class evaluation_mode:
    """Modules in evaluation mode inside the ``with`` block, back as they were after."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __enter__(self) -> None:
        self.training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()

    def __exit__(self, *_: object) -> None:
        for module, training in zip(self.modules, self.training):
            module.train(training)


def scaled(loss: Loss, num_micro_batches: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss whose gradients add up over micro-batches to those of their mean."""
    return lambda outputs, targets: loss(outputs, targets) / num_micro_batches

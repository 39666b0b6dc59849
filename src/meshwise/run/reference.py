"""The same training in one process: what a parallel run is held to.

Synchronous strategies: plain steps on the global batch. Batch norm's statistics belong to a set of samples, so where a
model has it the batch is taken in the strategy's own sets: each replica's micro-batches (``batch_norm=local``) or the
union over replicas (``sync``). PipeDream and its relatives: their update rules, stage by stage, with every weight
version kept [Narayanan 2019, 2021].
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwise.run.batch_norm import has_batch_norm
from meshwise.run.chain import chain_of, cut
from meshwise.run.executor import Loss, OptimizerFactory
from meshwise.run.pipeline import Part, original_names
from meshwise.strategy import Strategy
from meshwise.strategy.schedule import forward_version

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of every step, the parameters after the last by original name, and sets of names that share a weight."""

    losses: list[float]
    parameters: dict[str, Tensor]
    tied: list[set[str]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the reference and the parallel run share."""

    strategy: Strategy
    loss: Loss
    optimizer: OptimizerFactory
    clip_norm: float = 0.0
    example: Tensor | None = None


def train_reference(module: nn.Module, batches: Sequence[Batch], recipe: Recipe) -> Trained:
    """Trains ``module`` in place on global batches."""
    if recipe.strategy.asynchronous:
        return _train_asynchronous(module, batches, recipe)
    optimizer = recipe.optimizer([p for p in module.parameters() if p.requires_grad])
    sets = has_batch_norm(module)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        chunks = list(sample_sets(inputs, targets, recipe.strategy)) if sets else [(inputs, targets)]
        total = torch.zeros((), dtype=torch.float64)
        for x, y in chunks:
            loss = recipe.loss(module(x), y) / len(chunks)
            loss.backward()
            total += loss.detach().double()
        if recipe.clip_norm > 0:
            nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_norm)
        optimizer.step()
        losses.append(float(total))
    return Trained(losses=losses, parameters=_named(module), tied=_tied(module))


def sample_sets(inputs: Tensor, targets: Tensor, strategy: Strategy) -> Iterator[Batch]:
    """The sets of samples whose statistics a batch norm of ``strategy`` sees together, in order."""
    replicas, count = strategy.data_parallel_size, strategy.num_micro_batches
    x = [part.chunk(count) for part in inputs.chunk(replicas)]
    y = [part.chunk(count) for part in targets.chunk(replicas)]
    if strategy.batch_norm == "sync":
        for k in range(count):
            yield torch.cat([x[d][k] for d in range(replicas)]), torch.cat([y[d][k] for d in range(replicas)])
    else:
        for d in range(replicas):
            for k in range(count):
                yield x[d][k], y[d][k]


def _train_asynchronous(module: nn.Module, batches: Sequence[Batch], recipe: Recipe) -> Trained:
    strategy = recipe.strategy
    stages = _stages(module, recipe)
    per_update = strategy.num_micro_batches if strategy.schedule == "pipedream-2bw" else 1
    replicas = strategy.data_parallel_size
    losses, number = [], 0
    for inputs, targets in batches:
        total = 0.0
        x = [part.chunk(strategy.num_micro_batches) for part in inputs.chunk(replicas)]
        y = [part.chunk(strategy.num_micro_batches) for part in targets.chunk(replicas)]
        for k in range(strategy.num_micro_batches):
            for d in range(replicas):
                versions = [forward_version(strategy, index, number) for index in range(len(stages))]
                total += _gradients(stages, versions, (x[d][k], y[d][k]), recipe.loss)
            number += 1
            if number % per_update == 0:
                for stage in stages:
                    stage.update(replicas * per_update)
        losses.append(total / (replicas * strategy.num_micro_batches))
    named = {name: tensor for stage in stages for name, tensor in stage.named().items()}
    return Trained(losses=losses, parameters=named, tied=[])


def _gradients(stages: Sequence[_Stage], versions: Sequence[int], batch: Batch, loss: Loss) -> float:
    """Adds one micro-batch's gradients to every stage's sum; its loss."""
    x, leaves = batch[0], []
    for stage, version in zip(stages, versions):
        leaves.append({name: t.clone().requires_grad_() for name, t in stage.versions[version].items()})
        x = torch.func.functional_call(stage.part, leaves[-1], (x,))
    value = loss(x, batch[1])
    flat = [leaf for stage_leaves in leaves for leaf in stage_leaves.values()]
    gradients = iter(torch.autograd.grad(value, flat, allow_unused=True))
    for stage, stage_leaves in zip(stages, leaves):
        for name in stage_leaves:
            gradient = next(gradients)
            if gradient is not None:
                stage.sums[name] = stage.sums[name] + gradient if name in stage.sums else gradient
    return float(value.detach())


class _Stage:
    def __init__(self, part: Part, names: dict[str, str], optimizer: OptimizerFactory) -> None:
        self.part, self.names = part, names
        self.optimizer = optimizer(part.parameters())
        self.versions = [self._snapshot()]
        self.sums: dict[str, Tensor] = {}

    def update(self, divisor: int) -> None:
        for name, parameter in self.part.named_parameters():
            gradient = self.sums.get(name)
            parameter.grad = None if gradient is None else gradient / divisor
        self.optimizer.step()
        self.sums = {}
        self.versions.append(self._snapshot())

    def named(self) -> dict[str, Tensor]:
        """Parameters by original name."""
        return {self.names[key]: p.detach().clone() for key, p in self.part.named_parameters()}

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.part.named_parameters()}


def _stages(module: nn.Module, recipe: Recipe) -> list[_Stage]:
    """Stages that share no weight, as the asynchronous executor has them."""
    parts = [Part(links) for links in cut(chain_of(module), recipe.strategy.num_stages, recipe.example)]
    names = [original_names(module, part) for part in parts]
    return [_Stage(copy.deepcopy(part), part_names, recipe.optimizer) for part, part_names in zip(parts, names)]


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters(remove_duplicate=False)}


def _tied(module: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]

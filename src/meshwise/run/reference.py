"""The same training in one process: what a parallel run is held to.

Synchronous strategies: plain steps on the global batch. Batch norm's statistics belong to a set of samples, so where a
model has it the batch is taken in the strategy's own sets: each replica's micro-batches (``batch_norm=local``) or the
union over replicas (``sync``). PipeDream and its relatives: their update rules, stage by stage, with every weight
version kept [Narayanan 2019, 2021]. A weight that stages share is the first's: all use its version of the micro-batch,
and its gradient is the sum of theirs.
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
from meshwise.run.tied_weights import ties_between
from meshwise.strategy import Strategy
from meshwise.strategy.schedule import forward_version, micro_batches_per_update

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
    per_update = micro_batches_per_update(strategy)
    replicas = strategy.data_parallel_size
    losses, number = [], 0
    for inputs, targets in batches:
        values: list[list[Tensor]] = [[] for _ in range(replicas)]
        x = [part.chunk(strategy.num_micro_batches) for part in inputs.chunk(replicas)]
        y = [part.chunk(strategy.num_micro_batches) for part in targets.chunk(replicas)]
        for k in range(strategy.num_micro_batches):
            for d in range(replicas):
                versions = [forward_version(strategy, index, number) for index in range(len(stages))]
                values[d].append(_gradients(stages, versions, (x[d][k], y[d][k]), recipe.loss))
            number += 1
            if number % per_update == 0:
                for stage in stages:
                    stage.update(replicas * per_update)
        losses.append(float(torch.stack([torch.stack(own).mean() for own in values]).mean()))
    named = {name: tensor for stage in stages for name, tensor in stage.named(stages).items()}
    return Trained(losses=losses, parameters=named, tied=[])


def _gradients(stages: Sequence[_Stage], versions: Sequence[int], batch: Batch, loss: Loss) -> Tensor:
    """Adds one micro-batch's gradients to every stage's sum; its loss."""
    x, leaves = batch[0], []
    for stage, version in zip(stages, versions):
        values = stage.versions[version] | {
            name: stages[home].versions[versions[home]][home_name] for name, (home, home_name) in stage.borrowed.items()
        }
        leaves.append({name: t.clone().requires_grad_() for name, t in values.items()})
        x = torch.func.functional_call(stage.part, leaves[-1], (x,))
    value = loss(x, batch[1])
    flat = [leaf for stage_leaves in leaves for leaf in stage_leaves.values()]
    gradients = iter(torch.autograd.grad(value, flat, allow_unused=True))
    found = [{name: next(gradients) for name in stage_leaves} for stage_leaves in leaves]
    for stage, own in zip(stages, found):
        for name, (home, home_name) in stage.borrowed.items():
            _add(found[home], home_name, own.pop(name))
    for stage, own in zip(stages, found):
        for name, gradient in own.items():
            _add(stage.sums, name, gradient)
    return value.detach()


def _add(sums: dict[str, Tensor], name: str, gradient: Tensor | None) -> None:
    if gradient is not None:
        known = sums.get(name)
        sums[name] = gradient if known is None else known + gradient


class _Stage:
    """``borrowed``: name of a weight that is an earlier stage's → that stage's index and the weight's name there."""

    def __init__(
        self, part: Part, names: dict[str, str], optimizer: OptimizerFactory, *, borrowed: dict[str, tuple[int, str]]
    ) -> None:
        self.part, self.names, self.borrowed = part, names, borrowed
        self.updated = {name: p for name, p in part.named_parameters() if name not in borrowed}
        self.optimizer = optimizer(list(self.updated.values()) or [nn.Parameter(torch.empty(0))])
        self.versions = [self._snapshot()]
        self.sums: dict[str, Tensor] = {}

    def update(self, divisor: int) -> None:
        for name, parameter in self.updated.items():
            gradient = self.sums.get(name)
            parameter.grad = None if gradient is None else gradient / divisor
        self.optimizer.step()
        self.sums = {}
        self.versions.append(self._snapshot())

    def named(self, stages: Sequence[_Stage]) -> dict[str, Tensor]:
        """Parameters by original name."""
        own = {self.names[key]: p.detach().clone() for key, p in self.updated.items()}
        return own | {
            self.names[key]: stages[home].updated[name].detach().clone() for key, (home, name) in self.borrowed.items()
        }

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.updated.items()}


def _stages(module: nn.Module, recipe: Recipe) -> list[_Stage]:
    """Stages that share no storage, as on different devices."""
    parts = [Part(links) for links in cut(chain_of(module), recipe.strategy.num_stages, recipe.example)]
    borrowed: list[dict[str, tuple[int, str]]] = [{} for _ in parts]
    for tie in ties_between(parts):
        home, *others = sorted(tie)
        for other in others:
            borrowed[other][tie[other]] = home, tie[home]
    names = [original_names(module, part) for part in parts]
    return [
        _Stage(copy.deepcopy(part), part_names, recipe.optimizer, borrowed=part_borrowed)
        for part, part_names, part_borrowed in zip(parts, names, borrowed)
    ]


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters(remove_duplicate=False)}


def _tied(module: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]

"""``parallelize``: from a module and a strategy to an executor. The one table of what does what.

tensor axis    →  tensor.split_module             layers replaced by their parts, in place
pipeline axis  →  chain.cut, pipeline.Part         consecutive layers of the chain
checkpointing  →  checkpointing.run_checkpointed   around each layer (PipeDream: around its stage)
data axis      →  DataParallel | ZeroReplication | FullySharded | Replica
schedule       →  Accumulate | Pipeline | PipeDream
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.run.batch_norm import synchronise_batch_norm
from meshwise.run.chain import blocks_of, chain_of, cut, facts
from meshwise.run.checkpointing import checkpoint_blocks
from meshwise.run.collectives import Group
from meshwise.run.data_parallel import DataParallel, ReducedAtEnd
from meshwise.run.executor import Executor, Loss, OptimizerFactory
from meshwise.run.fully_sharded import FullySharded
from meshwise.run.groups import Groups, build_groups
from meshwise.run.pipedream import PipeDream
from meshwise.run.pipeline import Part, Pipeline, original_names
from meshwise.run.replication import GradientKind, Named, Replica, Replication
from meshwise.run.synchronous import Accumulate, Built
from meshwise.run.tensor import TensorSplit, split_module
from meshwise.run.tied_weights import Tie, ties_between
from meshwise.run.zero import ZeroReplication
from meshwise.strategy import Strategy, parse
from meshwise.strategy.legal import check
from meshwise.strategy.shard import Layout


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``parallelize`` takes besides module, strategy, loss and optimizer; see there."""

    clip_norm: float = 0.0
    device: torch.device | str | None = None
    example: Tensor | None = None
    global_batch_size: int | None = None
    seed: int = 0


def parallelize(
    module: nn.Module, strategy: Strategy | str, *, loss: Loss, optimizer: OptimizerFactory, **options: Any
) -> Executor:
    """Splits ``module`` over the processes of ``torch.distributed`` and returns what trains it.

    Call it on every process, with the same weights everywhere, after ``torch.distributed.init_process_group`` (not
    needed for one process). ``module`` is changed in place and must be used through the executor from then on.

    Args:
        module: takes one tensor (batch is dim 0) and gives what ``loss`` takes.
        strategy: a ``Strategy`` or its text, such as ``"data=2,tensor=2"`` or ``"zero3"``.
        loss: ``loss(outputs, targets)``, the mean over the samples given.
        optimizer: makes the optimizer from parameters, such as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``.
        **options: ``clip_norm`` largest global gradient norm, 0 for none; ``device`` (this process's accelerator, else
            CPU); ``example`` inputs of any batch size, to balance pipeline stages by FLOP instead of parameters;
            ``global_batch_size`` to check divisibility before the first step; ``seed`` of dropout, from which replicas
            get masks of their own.

    Raises:
        StrategyError: the strategy does not fit the module, the batch or the number of processes.
        ModelError: the module cannot be split as asked.
    """
    chosen = Options(**options)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    resolved = _resolve(strategy, world_size)
    example = chosen.example
    length = example.shape[1] if example is not None and example.dim() == 2 else None
    known = facts(module, type(module).__name__, sequence_length=length)
    check(resolved, known, chosen.global_batch_size or _any_batch(resolved), clip_norm=chosen.clip_norm)
    device = torch.device(chosen.device or default_device())
    groups = build_groups(resolved.mesh, device)
    if resolved.precision == "fp64":
        module = module.double()
    module.to(device)
    return _Builder(module, resolved, groups, loss, optimizer, chosen).build()


def default_device() -> torch.device:
    """This process's accelerator, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Builder:
    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        groups: Groups,
        loss: Loss,
        optimizer: OptimizerFactory,
        options: Options,
    ) -> None:
        self.module, self.strategy, self.groups = module, strategy, groups
        self.loss, self.optimizer, self.options = loss, optimizer, options
        self.ties: list[Tie] = []

    def build(self) -> Executor:
        strategy, groups = self.strategy, self.groups
        split = self._split_tensor()
        if strategy.batch_norm == "sync" and strategy.data_parallel_size > 1:
            synchronise_batch_norm(self.module, groups.group("data"))
        parts, owners = self._cut_pipeline()
        names = [original_names(self.module, part) for part in parts]
        self._seed(split)
        layouts = split.layouts if split else {}
        if strategy.asynchronous:
            return PipeDream(
                stage=parts[0],
                stage_names=names[0],
                strategy=strategy,
                groups=groups,
                loss=self.loss,
                optimizer=self.optimizer,
                device=groups.device,
                tied=self.ties,
            )
        if strategy.checkpointing != "none":
            for part in parts:
                checkpoint_blocks(blocks_of(part), strategy.checkpointing)
        if strategy.precision == "bf16":
            self._mix_precision(parts)
        tied_group = self._tied_group(owners)
        named = self._named(parts, names, layouts, owners)
        built = Built(
            strategy=strategy,
            groups=groups,
            parts=parts,
            names=names,
            layouts=layouts,
            replication=self._replicate(parts, named),
            loss=self.loss,
            tied_group=tied_group,
            outputs_whole=split is None or split.vocabulary_first is None,
            clip_norm=self.options.clip_norm,
        )
        return Pipeline(built) if strategy.pipeline_parallel_size > 1 else Accumulate(built)

    def _split_tensor(self) -> TensorSplit | None:
        if self.strategy.tensor_parallel_size == 1:
            return None
        ours = getattr(self.loss, "is_mean_cross_entropy", False)
        split = split_module(self.module, self.groups.group("tensor"), gather_vocabulary=not ours)
        if split.vocabulary_first is not None:
            self.loss = split.cross_entropy
        return split

    def _cut_pipeline(self) -> tuple[list[nn.Module], dict[int, set[int]]]:
        """This rank's parts, and which pipeline devices own each parameter (by ``id``)."""
        size, index = self.groups.size("pipeline"), self.groups.index("pipeline")
        if size == 1:
            return [self.module], {}
        example = None if self.strategy.tensor_parallel_size > 1 else self.options.example
        stages = [Part(links) for links in cut(chain_of(self.module), self.strategy.num_stages, example)]
        self.ties = ties_between(stages)
        owners: dict[int, set[int]] = {}
        for number, stage in enumerate(stages):
            for parameter in stage.parameters():
                owners.setdefault(id(parameter), set()).add(number % size)
        return list(stages[index::size]), owners

    def _tied_group(self, owners: Mapping[int, set[int]]) -> Group | None:
        """The group that adds up gradients of weights which stages on different devices share; made by all ranks."""
        shared = sorted({tuple(sorted(devices)) for devices in owners.values() if len(devices) > 1})
        if not shared:
            return None
        devices = sorted(set().union(*shared))
        own: Group | None = None
        mesh = self.groups.mesh
        for data in range(mesh.data):
            for tensor in range(mesh.tensor):
                ranks = [mesh.rank(pipeline=stage, data=data, tensor=tensor) for stage in devices]
                group = dist.new_group(ranks)
                if self.groups.rank in ranks and isinstance(group, dist.ProcessGroup):
                    own = group
        return own

    def _named(
        self,
        parts: Sequence[nn.Module],
        names: Sequence[Mapping[str, str]],
        layouts: Mapping[str, Layout],
        owners: Mapping[int, set[int]],
    ) -> Named:
        parameters: dict[str, nn.Parameter] = {}
        kinds: dict[str, GradientKind] = {}
        for part, part_names in zip(parts, names):
            for key, parameter in part.named_parameters():
                name = part_names[key]
                layout = layouts.get(name, Layout())
                num_owners = len(owners.get(id(parameter), {0}))
                whole = layout.dim is None
                parameters[name] = parameter
                kinds[name] = GradientKind(
                    copies=(self.groups.size("tensor") if whole else 1) * num_owners,
                    partial=layout.partial,
                    tied=num_owners > 1,
                )
        return Named(parameters=parameters, kinds=kinds)

    def _replicate(self, parts: Sequence[nn.Module], named: Named) -> Replication:
        replicas = self.groups.size("data")
        if replicas == 1:
            return Replica(parts, named, self.optimizer)
        stage = self.strategy.zero_stage
        if stage == 3:
            device_mesh = self.groups.device_mesh
            if device_mesh is None:
                return Replica(parts, named, self.optimizer)
            return FullySharded(parts, named, self.optimizer, mesh=device_mesh["data"])
        group = self.groups.group("data")
        if stage:
            return ZeroReplication(parts, named, self.optimizer, group=group, stage=stage)
        if self.strategy.num_virtual_stages > 1:
            return ReducedAtEnd(parts, named, self.optimizer, group=group, replicas=replicas)
        return DataParallel(parts, named, self.optimizer, group=group, replicas=replicas)

    def _mix_precision(self, parts: Sequence[nn.Module]) -> None:
        """Forward and loss under autocast; backward follows the types of the forward and must stay outside."""
        mixed = torch.autocast(self.groups.device.type, dtype=torch.bfloat16)
        for part in parts:
            part.forward = mixed(part.forward)  # type: ignore[method-assign]
        self.loss = mixed(self.loss)

    def _seed(self, split: TensorSplit | None) -> None:
        """Dropout: other masks on every replica and stage; the same over a tensor group unless it splits sequences."""
        position = self.groups.mesh.coordinates(self.groups.rank)
        number = position["data"] * self.groups.size("pipeline") + position["pipeline"]
        if split is not None and split.sequence:
            number = number * self.groups.size("tensor") + position["tensor"]
        torch.manual_seed(self.options.seed * 100_003 + number)


def _resolve(strategy: Strategy | str, world_size: int) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    request = parse(strategy)
    # A request that names all its sizes may need another count; build_groups then says which.
    return request.at(world_size) or request.at(request.required_devices or 1) or Strategy()


def _any_batch(strategy: Strategy) -> int:
    return strategy.data_parallel_size * strategy.num_micro_batches

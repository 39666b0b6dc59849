"""The plainest loops a user would write with torch's own parts. Each function builds one and returns its step.

A step takes this rank's inputs and targets and gives the loss, or None on ranks that do not have it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from executors_lib.cases import OPTIMIZER, SETTINGS, Case, loss, optimizer
from meshwise.run.chain import chain_of, cut

Step = Callable[[Tensor, Tensor], Tensor | None]

NUM_MICRO_BATCHES = 4

# torch 2.13 renamed the two; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _loop(module: Callable[[Tensor], Tensor], update: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        update.zero_grad()
        value = loss(module(inputs), targets)
        value.backward()
        update.step()
        return value.detach()

    return step


def _ddp(module: nn.Module) -> DistributedDataParallel:
    # With DDP's two options that make it faster and change nothing here: meshwise uses them too.
    return DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)


def data(case: Case) -> Step:
    model = _ddp(case.build())
    return _loop(model, optimizer(model.parameters()))


def zero_redundancy(case: Case) -> Step:
    """torch's ZeRO-1: DDP, and every rank updates whole parameters of its own."""
    model = _ddp(case.build())
    return _loop(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OPTIMIZER, **SETTINGS))


def flat_zero(case: Case) -> Step:
    """ZeRO by hand: one flat buffer of weights and one of gradients, a reduce-scatter, an update, an all-gather."""
    module = case.build()
    size, rank = dist.get_world_size(), dist.get_rank()
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    weights, gradients = torch.zeros(2, -(-total // size) * size).unbind()
    offset = 0
    for parameter in parameters:
        where = slice(offset, offset + parameter.numel())
        offset = where.stop
        weights[where].view_as(parameter).copy_(parameter.detach())
        parameter.data = weights[where].view_as(parameter)
        parameter.grad = gradients[where].view_as(parameter)
    own = nn.Parameter(weights.chunk(size)[rank])
    own.grad = torch.empty_like(own)
    update = optimizer([own])

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        gradients.zero_()
        value = loss(module(inputs), targets)
        value.backward()
        _reduce_scatter(own.grad, gradients, op=dist.ReduceOp.AVG)
        update.step()
        _all_gather(weights, own.detach().clone())
        return value.detach()

    return step


def fully_sharded(case: Case) -> Step:
    model = case.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _shards(case, model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, optimizer(model.parameters()))


def _shards(case: Case, model: nn.Module) -> list[nn.Module] | list[list[nn.Module]]:
    """GPT-2: its blocks. CNN: the layers between two pools; the linear layers are left to the root."""
    if case.name == "gpt":
        return list(model.transformer.h)
    groups: list[list[nn.Module]] = [[]]
    for layer in model:
        if isinstance(layer, nn.Flatten):
            break
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    return [group for group in groups if group]


def tensor(case: Case) -> Step:
    from executors_lib.plain_gpt import PlainGPT, split

    model = PlainGPT(case.build())
    split(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    update = optimizer(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        update.zero_grad()
        with loss_parallel():
            value = loss(model(inputs), targets)
            value.backward()
        update.step()
        return value.detach().full_tensor()

    return step


def stages_of(case: Case, stages_per_rank: int) -> list[nn.Sequential]:
    """The model in consecutive stages, cut where meshwise cuts it, so that the work is the same."""
    count = dist.get_world_size() * stages_per_rank
    parts = cut(chain_of(case.build()), count, case.batch(0)[0])
    return [nn.Sequential(*(layer for _, layer in part)) for part in parts]


def pipeline(case: Case, schedule: type, stages_per_rank: int = 1) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    modules = stages_of(case, stages_per_rank)
    own = range(rank, len(modules), size)
    stages = [PipelineStage(modules[index], index, len(modules), torch.device("cpu")) for index in own]
    argument = stages[0] if stages_per_rank == 1 else stages
    run = schedule(argument, NUM_MICRO_BATCHES, loss_fn=loss)
    parameters = list({p: None for index in own for p in modules[index].parameters()})
    everywhere = [p for p in modules[0].parameters() if any(p is q for q in modules[-1].parameters())]
    update = optimizer(parameters)

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        update.zero_grad()
        losses: list[Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        ending = {"target": targets, "losses": losses} if rank == size - 1 else {}
        run.step(*arguments, **ending, return_outputs=False)
        for tied in everywhere:  # the token embedding, first and last stage
            dist.all_reduce(tied.grad)
        update.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def gpipe(case: Case) -> Step:
    return pipeline(case, ScheduleGPipe)


def one_forward_one_backward(case: Case) -> Step:
    return pipeline(case, Schedule1F1B)


def interleaved(case: Case) -> Step:
    return pipeline(case, ScheduleInterleaved1F1B, stages_per_rank=2)


def stage_alone(case: Case) -> Step:
    """A pipeline that never waits: each rank runs its stage, forward, backward and update, on tensors it has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    modules = stages_of(case, 1)
    module, first, last = modules[rank], rank == 0, rank == size - 1
    update = optimizer(module.parameters())
    received: Tensor | None = None
    for before in modules[:rank]:
        with torch.no_grad():
            inputs = case.batch(0)[0].chunk(NUM_MICRO_BATCHES)[0] if received is None else received
            received = before(inputs)

    def step(inputs: Tensor, targets: Tensor) -> None:
        for x, y in zip(inputs.chunk(NUM_MICRO_BATCHES), targets.chunk(NUM_MICRO_BATCHES)):
            update.zero_grad()
            output = module(x if first else received.detach().requires_grad_())
            if last:
                loss(output, y).backward()
            else:
                output.backward(output.detach())
            update.step()

    return step

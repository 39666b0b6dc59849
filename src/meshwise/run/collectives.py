"""The collectives we call, under one name over torch 2.11 to 2.14, and their autograd forms for tensor parallelism.

Shapes: B batch, S sequence, C channels, … any. Each function names what backward does: the two directions are adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from meshwise.measure.communication import logical_kind

Group = dist.ProcessGroup

# torch 2.13 renamed the two; the old names warn there and the new ones are absent before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# gloo learnt all_to_all with lists after torch 2.11 (absent there, present in 2.13).
_GLOO_EXCHANGES_LISTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class _Exchange:
    """A reduce-scatter made of an exchange of parts and a local sum, not yet summed."""

    work: Pending
    received: Tensor
    part: Tensor

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received, 0, out=self.part)


def all_gather(output: Tensor, part: Tensor, group: Group) -> Pending:
    """Starts ``output`` (ranks·n) = the ``part`` (n) of every rank, in rank order; ``part`` may lie in ``output``.

    On gloo by pairwise exchange, which moves the same bytes as its ring and takes half the time (``benchmarks/``).
    """
    with logical_kind("all_gather"):
        if dist.get_backend(group) != "gloo" or not _GLOO_EXCHANGES_LISTS:
            return _started(_all_gather_single(output, part, group=group, async_op=True))
        size = dist.get_world_size(group)
        return _started(dist.all_to_all(list(output.chunk(size)), [part.clone()] * size, group=group, async_op=True))


def reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Pending:
    """Starts ``part`` (n) = this rank's slice of the sum over ranks of ``whole`` (ranks·n); done after ``wait()``.

    On gloo by pairwise exchange and a local sum in rank order: gloo's own takes longer than its all-reduce of the same
    buffer. ``part`` may lie in ``whole``.
    """
    with logical_kind("reduce_scatter"):
        if dist.get_backend(group) != "gloo":
            return _started(_reduce_scatter_single(part, whole, op=dist.ReduceOp.SUM, group=group, async_op=True))
        received = torch.empty_like(whole)
        work = _started(dist.all_to_all_single(received, whole, group=group, async_op=True))
        return _Exchange(work, received.view(dist.get_world_size(group), -1), part.view(-1))


def _started(work: Any) -> Pending:
    return work


def all_reduce(tensor: Tensor, group: Group) -> None:
    """``tensor`` = its sum over ranks, in place."""
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)


def all_reduce_coalesced(tensors: list[Tensor], group: Group) -> None:
    """Sums each of ``tensors`` over ranks in place, with one collective."""
    if not tensors:
        return
    if len(tensors) == 1 and tensors[0].is_contiguous():
        all_reduce(tensors[0], group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat, group)
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()


def gather_dim(part: Tensor, dim: int, group: Group) -> Tensor:
    """Parts of all ranks joined along ``dim``."""
    size = dist.get_world_size(group)
    moved = part.movedim(dim, 0).contiguous()
    whole = moved.new_empty((moved.shape[0] * size, *moved.shape[1:]))
    all_gather(whole, moved, group).wait()
    return whole.movedim(0, dim).contiguous()


def reduce_scatter_dim(whole: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice along ``dim`` of the sum over ranks."""
    size = dist.get_world_size(group)
    moved = whole.movedim(dim, 0).contiguous()
    part = moved.new_empty((moved.shape[0] // size, *moved.shape[1:]))
    reduce_scatter(part, moved, group).wait()
    return part.movedim(0, dim).contiguous()


def own_slice(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class CopyIn(Function):
    """Identity; backward sums over ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        all_reduce(gradient, ctx.group)
        return gradient, None


class ReduceOut(Function):
    """Sum over ranks; backward is the identity (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class GatherIn(Function):
    """Joins sequence parts; backward reduce-scatters (every rank used the whole)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return reduce_scatter_dim(gradients[0], ctx.dim, ctx.group), None, None


class ScatterOut(Function):
    """Sums over ranks and keeps this rank's sequence part; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather_dim(gradients[0], ctx.dim, ctx.group), None, None


class GatherOut(GatherIn):
    """Joins channel parts; backward keeps this rank's slice (what follows is computed alike on every rank)."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return own_slice(gradients[0], ctx.dim, ctx.group), None, None

"""Batch norm whose statistics are those of all replicas' samples together. torch's own works on GPUs only.

Forward and backward in the two-pass form (mean first, then squared distances), which keeps float64 proofs exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from meshwise.run.collectives import Group, all_reduce


class _Normalise(Function):
    """x ``[B, C, …]`` → (x - mean) / sqrt(var + eps), statistics over all dims but C and over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.numel() // x.shape[1] * dist.get_world_size(group)
        mean = x.sum(dims) / count
        all_reduce(mean, group)
        centred = x - mean.view(shape)
        variance = (centred * centred).sum(dims) / count
        all_reduce(variance, group)
        inverse = (variance + eps).rsqrt()
        normalised = centred * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse)
        ctx.dims, ctx.shape, ctx.count, ctx.group = dims, shape, count, group
        ctx.mark_non_differentiable(mean, variance)
        return normalised, mean, variance * (count / max(count - 1, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normalised, inverse = ctx.saved_tensors
        gradient = gradients[0]
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normalised).sum(ctx.dims)]) / ctx.count
        all_reduce(sums, ctx.group)
        mean, slope = sums[0].view(ctx.shape), sums[1].view(ctx.shape)
        return (gradient - mean - normalised * slope) * inverse.view(ctx.shape), None, None


class SynchronisedBatchNorm(nn.Module):
    """Drop-in for BatchNorm1d/2d/3d in training with equal local batches on every rank of ``group``."""

    def __init__(self, source: nn.modules.batchnorm._BatchNorm, group: Group) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.eps, self.momentum, self.group = source.eps, source.momentum, group
        self.num_features = source.num_features
        self.track_running_stats = source.track_running_stats

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        normalised, mean, variance = _Normalise.apply(x, self.eps, self.group)
        self._track(mean, variance)
        if self.weight is None:
            return normalised
        shape = [1, -1, *[1] * (x.dim() - 2)]
        return normalised * self.weight.view(shape) + self.bias.view(shape)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if (
            not self.track_running_stats
            or self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(variance.to(self.running_var), momentum)


def synchronise_batch_norm(module: nn.Module, group: Group) -> None:
    """Replaces every batch norm of ``module``, in place."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, SynchronisedBatchNorm(layer, group))


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def average_running_statistics(module: nn.Module, group: Group) -> None:
    """Replaces running statistics by their mean over replicas, so that evaluation is the same on every one."""
    buffers = [
        b for n, b in module.named_buffers() if b.is_floating_point() and n.endswith(("running_mean", "running_var"))
    ]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    all_reduce(flat, group)
    flat /= dist.get_world_size(group)
    offset = 0
    for buffer in buffers:
        buffer.copy_(flat[offset : offset + buffer.numel()].view_as(buffer))
        offset += buffer.numel()

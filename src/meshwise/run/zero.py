"""ZeRO stages 1 and 2 [Rajbhandari et al. 2020], with the textbook's memory: over N replicas a device keeps

    stage 1    parameters Ψ   gradients Ψ      optimizer state K·Ψ/N
    stage 2    parameters Ψ   gradients Ψ/N    optimizer state K·Ψ/N

Parameters lie in flat buckets of N equal slices. During backward each bucket that is complete is reduce-scattered;
the optimizer updates this rank's slice in place (it is a view); an all-gather makes the bucket whole again. Volume per
step is 2Ψ(N-1)/N, as all-reduce. Exact for optimizers that treat every element by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.errors import StrategyError
from meshwise.run.collectives import Group, Pending, all_gather, reduce_scatter
from meshwise.run.executor import Held, OptimizerFactory
from meshwise.run.replication import GradientKind, GradientPart, Named, state_bytes, total_bytes
from meshwise.units import parse

BUCKET_BYTES = int(parse("25 MiB", "B"))
"""As DDP's default bucket: large enough for bandwidth, small enough to start before backward ends."""

MAX_BUCKETS_IN_FLIGHT = 2

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")


@dataclass
class Bucket:
    """Some parameters of one kind, flat. ``shard`` is this rank's slice of ``flat`` as the optimizer sees it."""

    names: list[str]
    parameters: list[nn.Parameter]
    kind: GradientKind
    flat: Tensor
    offsets: list[int]
    shard: nn.Parameter
    gradient: Tensor | None = None
    arrived: list[int] = field(default_factory=list)
    shard_gradient: Tensor | None = None
    pending: tuple[Pending, Tensor] | None = field(default=None)


class ZeroReplication:
    """Stage 1 or 2 over ``group``."""

    def __init__(
        self, parts: Sequence[nn.Module], named: Named, optimizer: OptimizerFactory, *, group: Group, stage: int
    ) -> None:
        self.modules = list(parts)
        self.named, self.group, self.stage = named, group, stage
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.buckets = [self._build(names) for names in _bucket_names(named)]
        self.frozen = {n: p for n, p in named.parameters.items() if not p.requires_grad}
        self.optimizer = optimizer([bucket.shard for bucket in self.buckets])
        _check_elementwise(self.optimizer)
        self.num_micro_batches = 1
        self.next_bucket = self.rounds_done = 0
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, position))

    def begin(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.next_bucket = self.rounds_done = 0
        for bucket in self.buckets:
            bucket.arrived = []
            bucket.shard.grad = bucket.shard_gradient = None
            if bucket.gradient is not None and num_micro_batches > 1:
                bucket.gradient.zero_()

    def before_micro_batch(self, *, last: bool) -> None:
        pass

    def finish(self) -> list[GradientPart]:
        self._launch_rest()
        parts = []
        for bucket in self.buckets:
            self._complete(bucket)
            gradient = bucket.shard_gradient
            if gradient is None:
                continue
            bucket.shard.grad = gradient.div_(self.size)
            parts.append(GradientPart(tensor=gradient, kind=bucket.kind, copies=bucket.kind.copies))
        return parts

    def update(self) -> None:
        self.optimizer.step()
        works = [all_gather(bucket.flat, bucket.shard.detach(), self.group) for bucket in self.buckets]
        for work in works:
            work.wait()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named.parameters.items():
            yield name, parameter.detach()

    def held(self) -> Held:
        gradients = [t for b in self.buckets for t in (b.gradient, b.shard_gradient) if t is not None]
        return Held(
            parameters=total_bytes([bucket.flat for bucket in self.buckets] + list(self.frozen.values())),
            gradients=total_bytes(gradients),
            optimizer_state=state_bytes(self.optimizer),
        )

    def release_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.shard.grad = bucket.shard_gradient = bucket.gradient = None

    def _build(self, names: list[str]) -> Bucket:
        parameters = [self.named.parameters[name] for name in names]
        offsets, total = [], 0
        for parameter in parameters:
            offsets.append(total)
            total += parameter.numel()
        padded = -(-total // self.size) * self.size
        flat = parameters[0].detach().new_zeros(padded)
        for parameter, offset in zip(parameters, offsets):
            view = flat[offset : offset + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        return Bucket(
            names=names,
            parameters=parameters,
            kind=self.named.kinds[names[0]],
            flat=flat,
            offsets=offsets,
            shard=nn.Parameter(self._own(flat)),
        )

    def _own(self, flat: Tensor) -> Tensor:
        length = len(flat) // self.size
        return flat[self.index * length : (self.index + 1) * length]

    def _arrived(self, bucket: Bucket, position: int, parameter: nn.Parameter) -> None:
        """A parameter's gradient of one micro-batch is complete: move it to the bucket, send the bucket when full."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        target = self._slot(bucket, position)
        if self.stage == 1 and self.num_micro_batches > 1:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        bucket.arrived.append(position)
        self._launch_ready()

    def _slot(self, bucket: Bucket, position: int) -> Tensor:
        """Where the gradient of a bucket's parameter goes; a new buffer is zero only where nothing will be written."""
        if bucket.gradient is None:
            add_up = self.stage == 1 and self.num_micro_batches > 1
            bucket.gradient = torch.zeros_like(bucket.flat) if add_up else torch.empty_like(bucket.flat)
            bucket.gradient[bucket.offsets[-1] + bucket.parameters[-1].numel() :] = 0
        parameter, offset = bucket.parameters[position], bucket.offsets[position]
        return bucket.gradient[offset : offset + parameter.numel()].view(parameter.shape)

    def _launch_ready(self) -> None:
        """Sends buckets that are complete, always in the same order on every rank."""
        rounds = self.num_micro_batches if self.stage == 1 else 1
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if len(bucket.arrived) < rounds * len(bucket.parameters):
                return
            self._launch(bucket)
        self.rounds_done += 1
        if self.stage == 2 and self.rounds_done < self.num_micro_batches:
            # The next micro-batch fills the buckets anew.
            self.next_bucket = 0
            for bucket in self.buckets:
                bucket.arrived = []

    def _launch_rest(self) -> None:
        """Sends what unused parameters kept back, with zeros in their place."""
        if self.stage == 2 and self.num_micro_batches > 1 and self.rounds_done < self.num_micro_batches:
            bucket = self.buckets[self.next_bucket]
            raise StrategyError(
                f"a parameter among {', '.join(bucket.names)} got no gradient in some micro-batch, and zero=2 sends "
                "every micro-batch's gradients as they come; use zero=1, or micro_batches=1"
            )
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            for position in set(range(len(bucket.parameters))) - set(bucket.arrived):
                self._slot(bucket, position).zero_()
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        gradient = bucket.gradient
        if gradient is None:
            return
        self.next_bucket += 1
        self._complete(bucket)
        out = self._own(gradient) if self.stage == 1 else gradient.new_empty(len(gradient) // self.size)
        bucket.pending = (reduce_scatter(out, gradient, self.group), out)
        if self.stage == 2:
            bucket.gradient = None
            in_flight = [other for other in self.buckets if other.pending is not None and other is not bucket]
            for other in in_flight[: max(0, len(in_flight) + 1 - MAX_BUCKETS_IN_FLIGHT)]:
                self._complete(other)

    def _complete(self, bucket: Bucket) -> None:
        if bucket.pending is None:
            return
        work, out = bucket.pending
        work.wait()
        bucket.pending = None
        if bucket.shard_gradient is None or self.stage == 1:
            bucket.shard_gradient = out
        else:
            bucket.shard_gradient.add_(out)


def _bucket_names(named: Named) -> list[list[str]]:
    """Names in the order gradients arrive (last layer first), one kind and dtype a bucket, up to ``BUCKET_BYTES``."""
    buckets: dict[tuple[GradientKind, torch.dtype], list[list[str]]] = {}
    sizes: dict[tuple[GradientKind, torch.dtype], int] = {}
    order: list[list[str]] = []
    seen: set[int] = set()
    for name, parameter in reversed(list(named.parameters.items())):
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        key = (named.kinds[name], parameter.dtype)
        nbytes = parameter.numel() * parameter.element_size()
        if key not in buckets or sizes[key] + nbytes > BUCKET_BYTES:
            bucket: list[str] = []
            buckets.setdefault(key, []).append(bucket)
            order.append(bucket)
            sizes[key] = 0
        buckets[key][-1].append(name)
        sizes[key] += nbytes
    return order


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if name not in ELEMENTWISE:
        raise StrategyError(
            f"{name} looks at whole parameters, and ZeRO stages 1 and 2 update slices of several; use one of "
            f"{', '.join(ELEMENTWISE[:3])}, or zero=0"
        )

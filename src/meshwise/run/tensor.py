"""Intra-layer (tensor) parallelism: layers are replaced, in place and under their own names, by split ones.

Our own few layers rather than DTensor's styles: DTensor convolutions are wrong for anything but batch splits in torch
2.13 and 2.14, its styles know neither ``Conv1D`` nor fused query-key-value weights, and ``parallelize_module`` silently
unties tied embeddings. Parameters stay plain tensors, so data parallelism, ZeRO and pipelines compose without special
cases; ``Layout`` remembers how each one was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.errors import StrategyError
from meshwise.run.collectives import CopyIn, GatherIn, GatherOut, Group, ReduceOut, ScatterOut, all_reduce
from meshwise.strategy.shard import TABLES, Layout, Rule, chain_splits, part_ranges, rule_for

SEQUENCE_DIM = 1
Operation = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class SplitLayer(nn.Module):
    """A linear or convolution with part of its weight: ``leave(operation(enter(x)))``, under the original names."""

    bias: nn.Parameter | None

    def __init__(self, source: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.operation = _operation(source)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.enter: Callable[[Tensor], Tensor] = _identity
        self.leave: Callable[[Tensor], Tensor] = _identity
        self.bias_after = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.bias_after or self.bias is None:
            return self.leave(self.operation(self.enter(x), self.weight, self.bias))
        y = self.leave(self.operation(self.enter(x), self.weight, None))
        channels_last = y.dim() < 4
        return y + (self.bias if channels_last else self.bias.view(-1, 1, 1))


class SplitEmbedding(nn.Module):
    """Rows of an embedding: ids of other devices give zeros, the sum over devices is the embedding. ids ``[B, S]``."""

    def __init__(self, source: nn.Embedding, weight: nn.Parameter, *, first: int, group: Group) -> None:
        super().__init__()
        self.weight, self.first, self.group = weight, first, group
        self.embedding_dim = source.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return ScatterOut.apply(rows, SEQUENCE_DIM, self.group)


class PositionSlice(nn.Module):
    """An embedding of positions that answers for this device's part of the sequence only. positions ``[…, S]``."""

    def __init__(self, source: nn.Embedding, *, group: Group) -> None:
        super().__init__()
        self.weight, self.group = source.weight, group

    def forward(self, positions: Tensor) -> Tensor:
        own = positions.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        return F.embedding(own, self.weight)


class SplitCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose vocabulary is split. logits ``[N, V/t]``, targets ``[N]``."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:  # type: ignore[no-untyped-def]
        highest = logits.max(-1).values if logits.shape[-1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - highest[:, None]).exp()
        local = targets - first
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)
        chosen = logits.gather(-1, local[:, None]).squeeze(-1) - highest if logits.shape[-1] else highest * 0
        sums = torch.stack([exponentials.sum(-1), chosen.masked_fill(outside, 0)])
        all_reduce(sums, group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, outside)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        probabilities, local, outside = ctx.saved_tensors
        logits_gradient = probabilities.clone()
        if logits_gradient.shape[-1]:
            hit = (~outside).to(logits_gradient.dtype)
            logits_gradient.scatter_add_(-1, local[:, None], -hit[:, None])
        return logits_gradient * (gradient / len(local)), None, None, None


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """What ``split_module`` did.

    Attributes:
        layouts: by parameter (and buffer) name; names not listed are held whole and alike on every device.
        vocabulary_first: where this device's part of the logits starts; None if logits are whole.
        sequence: whether activations between the split layers are parts of the sequence (else whole on every device).
    """

    layouts: dict[str, Layout]
    vocabulary_first: int | None
    sequence: bool
    group: Group

    def cross_entropy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over split logits ``[…, V/t]``; targets ``[…]`` are class numbers of the whole."""
        logits = outputs.reshape(-1, outputs.shape[-1])
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return SplitCrossEntropy.apply(logits, targets.reshape(-1), self.vocabulary_first or 0, self.group)


def table_for(module: nn.Module) -> list[tuple[str, Rule]]:
    """(module name, rule) for every module the tensor axis touches.

    Looked up in this order: the module's own ``tensor_table`` (pairs of pattern and split), ``TABLES`` by class name, a
    plain chain, and else a filter split of every linear and convolution.
    """
    own = getattr(module, "tensor_table", None)
    table = [Rule(pattern=row[0], split=row[1], blocks=(*row, 1)[2]) for row in own] if own else None
    table = table or list(TABLES.get(type(module).__name__, ()))
    if table:
        named = dict(module.named_modules())
        return [(name, rule) for name in named if name and (rule := rule_for(name, table))]
    chain = _plain_chain(module)
    if chain:
        splits = chain_splits([_kind(layer) for _, layer in chain])
        return [(name, Rule(pattern=name, split=split)) for (name, _), split in zip(chain, splits) if split]
    # MultiheadAttention reads its out_proj's weight without calling the layer.
    return [
        (name, Rule(pattern=name, split="filter"))
        for name, layer in module.named_modules()
        if _kind(layer) == "matrix" and name and not name.endswith("out_proj")
    ]


def tensor_sizes(module: nn.Module) -> list[tuple[str, int]]:
    """What a tensor axis must divide: (what, size), the smallest of each kind first."""
    sizes: dict[str, int] = {}
    named = dict(module.named_modules())
    for name, rule in table_for(module):
        layer = named[name]
        if rule.split == "heads":
            sizes["attention heads"] = int(layer.num_heads)
        elif rule.split == "column":
            size = _output_size(layer)
            if size % rule.blocks == 0:
                sizes.setdefault(f"outputs in {name}", size // rule.blocks)
    widths = sorted((size, what) for what, size in sizes.items() if what != "attention heads")
    heads = [("attention heads", sizes["attention heads"])] if "attention heads" in sizes else []
    return heads + [(what, size) for size, what in widths]


def split_module(module: nn.Module, group: Group, *, gather_vocabulary: bool) -> TensorSplit:
    """Replaces, in place, the layers of ``module`` that its table names by this device's parts.

    Args:
        module: whole weights, the same on every device.
        group: the tensor group.
        gather_vocabulary: give whole logits (for a loss that is not ours) instead of split ones.
    """
    splitter = _Splitter(module, group, gather_vocabulary)
    for name, rule in table_for(module):
        splitter.apply(name, rule)
    if not splitter.layouts:
        raise StrategyError(
            f"no layer of {type(module).__name__} has outputs that tensor={splitter.size} divides; "
            "use a smaller tensor size, or data parallelism"
        )
    return TensorSplit(
        layouts=splitter.layouts,
        vocabulary_first=splitter.vocabulary_first,
        sequence=splitter.sequence,
        group=group,
    )


class _Splitter:
    def __init__(self, module: nn.Module, group: Group, gather_vocabulary: bool) -> None:
        self.module, self.group, self.gather_vocabulary = module, group, gather_vocabulary
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.layouts: dict[str, Layout] = {}
        self.vocabulary_first: int | None = None
        self.done: dict[int, nn.Parameter] = {}
        self.sequence = any(rule.split == "sequence" for _, rule in table_for(module))

    def apply(self, name: str, rule: Rule) -> None:
        layer = self.module.get_submodule(name)
        getattr(self, f"_{rule.split}")(name, layer, rule)

    def part(self, name: str, parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
        """This device's part of ``parameter``; the same object for parameters that are tied."""
        self.layouts[name] = layout
        if id(parameter) not in self.done:
            ranges = part_ranges(layout, self.index, self.size)
            indices = torch.tensor([i for r in ranges for i in r], dtype=torch.long)
            data = parameter.detach().index_select(layout.dim or 0, indices.to(parameter.device)).clone()
            self.done[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            self.done[id(self.done[id(parameter)])] = self.done[id(parameter)]
        return self.done[id(parameter)]

    def replace(self, name: str, layer: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.module.get_submodule(parent), child, layer)

    def matrix(self, name: str, layer: Any, *, along: str, blocks: int = 1) -> SplitLayer:
        outputs_dim = 1 if _is_conv1d(layer) else 0
        dim = outputs_dim if along == "outputs" else 1 - outputs_dim
        layout = Layout(dim=dim, blocks=blocks, full_size=layer.weight.shape[dim])
        weight = self.part(f"{name}.weight", layer.weight, layout)
        bias = getattr(layer, "bias", None)
        if bias is not None and along == "outputs":
            bias = self.part(f"{name}.bias", bias, Layout(dim=0, blocks=blocks, full_size=bias.shape[0]))
        split = SplitLayer(layer, weight, bias)
        self.replace(name, split)
        return split

    def _column(self, name: str, layer: nn.Module, rule: Rule) -> None:
        split = self.matrix(name, layer, along="outputs", blocks=rule.blocks)
        split.enter = self._gather_sequence if self.sequence else self._copy_in

    def _row(self, name: str, layer: nn.Module, rule: Rule) -> None:
        split = self.matrix(name, layer, along="inputs")
        split.leave = self._scatter_sequence if self.sequence else self._reduce
        split.bias_after = True
        if self.sequence and split.bias is not None:
            self.layouts[f"{name}.bias"] = Layout(partial=True)

    def _filter(self, name: str, layer: nn.Module, rule: Rule) -> None:
        if _output_size(layer) % self.size or getattr(layer, "groups", 1) != 1:
            return
        split = self.matrix(name, layer, along="outputs")
        split.enter = self._copy_in
        channel_dim = 1 if isinstance(layer, nn.Conv2d) else -1
        split.leave = lambda y: GatherOut.apply(y, channel_dim, self.group)

    def _channel(self, name: str, layer: nn.Module, rule: Rule) -> None:
        for key, parameter in list(layer.named_parameters(recurse=False)):
            layout = Layout(dim=0, full_size=parameter.shape[0])
            setattr(layer, key, self.part(f"{name}.{key}", parameter, layout))
        for key, buffer in list(layer.named_buffers(recurse=False)):
            if buffer.dim():
                layout = Layout(dim=0, full_size=buffer.shape[0])
                self.layouts[f"{name}.{key}"] = layout
                own = part_ranges(layout, self.index, self.size)[0]
                setattr(layer, key, buffer[own.start : own.stop].clone())
        layer.num_features = layer.num_features // self.size  # type: ignore[operator, assignment]

    def _vocabulary(self, name: str, layer: Any, rule: Rule) -> None:
        layout = Layout(dim=0, full_size=layer.weight.shape[0])
        weight_rows = part_ranges(layout, self.index, self.size)[0]
        if isinstance(layer, nn.Embedding):
            weight = self.part(f"{name}.weight", layer.get_parameter("weight"), layout)
            self.replace(name, SplitEmbedding(layer, weight, first=weight_rows.start, group=self.group))
            return
        full_size = int(layer.weight.shape[0])
        split = self.matrix(name, layer, along="outputs")
        split.enter = self._gather_sequence if self.sequence else self._copy_in
        if self.gather_vocabulary:
            split.leave = lambda y: _gather_uneven(y, full_size, self.group)
        else:
            self.vocabulary_first = weight_rows.start

    def _sequence(self, name: str, layer: nn.Module, rule: Rule) -> None:
        for key, _ in layer.named_parameters():
            self.layouts[f"{name}.{key}"] = Layout(partial=True)

    def _position(self, name: str, layer: nn.Module, rule: Rule) -> None:
        self.layouts[f"{name}.weight"] = Layout(partial=True)
        self.replace(name, PositionSlice(layer, group=self.group))  # type: ignore[arg-type]

    def _heads(self, name: str, layer: nn.Module, rule: Rule) -> None:
        for key in ("num_heads", "split_size", "embed_dim"):
            setattr(layer, key, getattr(layer, key) // self.size)

    def _copy_in(self, x: Tensor) -> Tensor:
        return CopyIn.apply(x, self.group)

    def _reduce(self, x: Tensor) -> Tensor:
        return ReduceOut.apply(x, self.group)

    def _gather_sequence(self, x: Tensor) -> Tensor:
        return GatherIn.apply(x, SEQUENCE_DIM, self.group)

    def _scatter_sequence(self, x: Tensor) -> Tensor:
        return ScatterOut.apply(x, SEQUENCE_DIM, self.group)


def _gather_uneven(part: Tensor, full_size: int, group: Group) -> Tensor:
    """Whole logits from parts that may differ in width by the rounding of the vocabulary."""
    size = dist.get_world_size(group)
    width = -(-full_size // size)
    padded = F.pad(part, (0, width - part.shape[-1]))
    return GatherOut.apply(padded, part.dim() - 1, group)[..., :full_size]


def _plain_chain(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Leaves of a module that is nothing but a chain: a Sequential, or torchvision's VGG."""
    plain = isinstance(module, nn.Sequential) or type(module).__name__ == "VGG"
    if not plain:
        return []
    containers = (nn.Sequential,)
    leaves = [(n, m) for n, m in module.named_modules() if n and not isinstance(m, containers)]
    inner = {n for n, m in leaves for other, _ in leaves if other != n and other.startswith(n + ".")}
    return [] if inner else leaves


def _kind(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear) or _is_conv1d(layer):
        return "matrix"
    if isinstance(layer, nn.Conv2d):
        return "matrix" if layer.groups == 1 and layer.padding_mode == "zeros" else "other"
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return "norm"
    pointwise = (
        nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Dropout, nn.Flatten, nn.Identity,
        nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    )  # fmt: skip
    return "pointwise" if isinstance(layer, pointwise) else "other"


def _is_conv1d(layer: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is stored ``[inputs, outputs]``."""
    return type(layer).__name__ == "Conv1D"


def _output_size(layer: nn.Module) -> int:
    return int(layer.weight.shape[1 if _is_conv1d(layer) else 0])  # type: ignore[index]


def _operation(layer: nn.Module) -> Operation:
    if isinstance(layer, nn.Conv2d):
        stride, padding, dilation = layer.stride, layer.padding, layer.dilation
        return lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation)
    if _is_conv1d(layer):
        return _conv1d
    return F.linear


def _conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


def _identity(x: Tensor) -> Tensor:
    return x

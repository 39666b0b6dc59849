"""How a module is cut into a chain of layers, what the checks must know of it, where a pipeline cuts the chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwise.errors import ModelError
from meshwise.run.batch_norm import has_batch_norm
from meshwise.run.tensor import table_for, tensor_sizes
from meshwise.strategy.legal import ModelFacts

Chain = list[tuple[str, nn.Module]]

_NO_CHAIN = (
    "is not a chain of layers; give it a method chain() that returns [(name, module), …] whose composition is its "
    "forward, make it an nn.Sequential, or use data, zero1, zero2, zero3 or tensor"
)

# Work of moving one output element, in FLOP: a core does about that many in the time of a 4-byte read and write. It
# only weighs normalisation and activation layers against matrix layers when a chain is cut into stages.
_FLOP_PER_ELEMENT = 16


class Apply(nn.Module):
    """A function as a layer of a chain."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class _InceptionTail(nn.Module):
    """Inception-V3 from where the auxiliary head leaves: logits, and in training (logits, auxiliary logits)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        names = ("Mixed_7a", "Mixed_7b", "Mixed_7c", "avgpool", "dropout")
        self.body = nn.Sequential(*(getattr(model, name) for name in names), nn.Flatten(1), model.fc)
        self.head = model.AuxLogits
        self.answer = model.eager_outputs  # torchvision's named pair in training, logits alone otherwise

    def forward(self, x: Tensor) -> Any:
        auxiliary = self.head(x) if self.training and self.head is not None else None
        return self.answer(self.body(x), auxiliary)


def _vgg(model: Any) -> Chain:
    return [
        *_flatten("features", model.features),
        ("avgpool", model.avgpool),
        ("flatten", nn.Flatten(1)),
        *_flatten("classifier", model.classifier),
    ]


def _resnet(model: Any) -> Chain:
    stem = [(name, getattr(model, name)) for name in ("conv1", "bn1", "relu", "maxpool")]
    blocks = [
        link for name in ("layer1", "layer2", "layer3", "layer4") for link in _flatten(name, getattr(model, name))
    ]
    return [*stem, *blocks, ("avgpool", model.avgpool), ("flatten", nn.Flatten(1)), ("fc", model.fc)]


def _inception(model: Any) -> Chain:
    names = [name for name, _ in model.named_children()]
    body = names[: names.index("AuxLogits")] if "AuxLogits" in names else names[: names.index("Mixed_7a")]
    head = [("input", Apply(model._transform_input))] if model.transform_input else []
    return [*head, *((name, getattr(model, name)) for name in body), ("tail", _InceptionTail(model))]


CHAINS: Mapping[str, Callable[[Any], Chain]] = MappingProxyType(
    {"VGG": _vgg, "ResNet": _resnet, "Inception3": _inception, "Sequential": lambda model: _flatten("", model)}
)
"""Class name of a module without a ``chain`` method of its own → how to cut it."""


def chain_of(module: nn.Module, name: str = "the model") -> Chain:
    """The layers whose composition is ``module.forward``; each takes and gives one tensor (the last may give more).

    Raises:
        ModelError: no way to cut it is known.
    """
    own = getattr(module, "chain", None)
    if callable(own):
        return list(own())
    cut = CHAINS.get(type(module).__name__)
    if cut is None:
        raise ModelError(f"{name} {_NO_CHAIN}")
    return cut(module)


def has_chain(module: nn.Module) -> bool:
    return callable(getattr(module, "chain", None)) or type(module).__name__ in CHAINS


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Layers to shard or recompute one at a time: the chain's, else the members of the largest list of layers."""
    if has_chain(module):
        # A chain may hold adapters made for it, which the module's own forward does not call.
        own = set(module.modules())
        return [layer for _, layer in chain_of(module) if layer in own]
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return list(largest) if largest is not None else []


def facts(module: nn.Module, name: str, *, sequence_length: int | None = None) -> ModelFacts:
    """What ``strategy.legal.check`` needs; the module may live on the meta device."""
    table = table_for(module)
    sizes = tensor_sizes(module)
    if sequence_length is not None and any(rule.split == "sequence" for _, rule in table):
        sizes.append(("positions in a sequence", sequence_length))
    return ModelFacts(
        name=name,
        num_layers=len(chain_of(module)) if has_chain(module) else 0,
        tensor_sizes=tuple(sizes),
        no_pipeline="" if has_chain(module) else _NO_CHAIN,
        no_tensor=""
        if table
        else "has no linear or convolution layer that a tensor axis could split; use data or zero1",
        has_batch_norm=has_batch_norm(module),
    )


def cut(chain: Chain, num_stages: int, example: Tensor | None) -> list[Chain]:
    """``num_stages`` consecutive parts, none empty, whose largest cost is as small as can be.

    Cost is forward FLOP (counted on the meta device from ``example``'s shape) plus output elements; without an example,
    parameters.
    """
    costs = _costs(chain, example)
    bounds = balanced_cuts(costs, num_stages)
    return [chain[start:stop] for start, stop in zip([0, *bounds], [*bounds, len(chain)])]


def balanced_cuts(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where to cut ``costs`` into consecutive non-empty parts so that the largest sum is least (exact, O(n²k))."""
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [prefix[stop] if stop else float("inf") for stop in range(count + 1)]
    choices: list[list[int]] = []
    for part in range(1, num_parts):
        values, choice = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(part + 1, count + 1):
            for start in range(part, stop):
                value = max(best[start], prefix[stop] - prefix[start])
                if value < values[stop]:
                    values[stop], choice[stop] = value, start
        best = values
        choices.append(choice)
    bounds, stop = [], count
    for choice in reversed(choices):
        stop = choice[stop]
        bounds.append(stop)
    return bounds[::-1]


def _costs(chain: Chain, example: Tensor | None) -> list[float]:
    if example is None:
        return [1.0 + sum(p.numel() for p in layer.parameters()) for _, layer in chain]
    costs = []
    x: Any = example.to("meta")
    for _, layer in chain:
        parameters = {n: p.to("meta") for n, p in [*layer.named_parameters(), *layer.named_buffers()]}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            x = torch.func.functional_call(layer, parameters, (x,))
        elements = x.numel() if isinstance(x, Tensor) else sum(t.numel() for t in x)
        costs.append(float(counter.get_total_flops()) + _FLOP_PER_ELEMENT * elements)
    return costs


def _flatten(name: str, module: nn.Module) -> Chain:
    """Children of nested Sequentials in order, under their dotted names."""
    if not isinstance(module, nn.Sequential):
        return [(name, module)]
    return [link for child, layer in module.named_children() for link in _flatten(f"{name}.{child}".lstrip("."), layer)]

"""Shard tables: which layer is split how over the tensor axis. The table that divides the FLOP divides the weights.

column      outputs split; followed by layers that work channel by channel, then by a row split   [Shoeybi 2019]
row         inputs split; partial sums are reduced, the bias added after
vocabulary  rows of an embedding, and the output layer tied to it; the loss works on split logits
channel     a norm between column and row: each device keeps the channels it has
sequence    a layer whose input is split along the sequence: weights whole, gradients partial     [Korthikanti 2022]
position    a sequence layer that is an embedding of positions
filter      outputs split and gathered again: right anywhere, costs an all-gather                 [LBANN]
heads       an attention module that must know it has fewer heads
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SPLITS = ("column", "row", "vocabulary", "channel", "sequence", "position", "filter", "heads")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Modules whose name matches ``pattern`` (shell style) are split so; each of ``blocks`` fused parts by itself."""

    pattern: str
    split: str
    blocks: int = 1


def _table(*rows: tuple[str, str] | tuple[str, str, int]) -> tuple[Rule, ...]:
    return tuple(Rule(pattern=row[0], split=row[1], blocks=row[2] if len(row) > 2 else 1) for row in rows)


_GPT2 = _table(
    ("transformer.wte", "vocabulary"),
    ("transformer.wpe", "position"),
    ("transformer.h.*.ln_?", "sequence"),
    ("transformer.h.*.attn", "heads"),
    ("transformer.h.*.attn.c_attn", "column", 3),
    ("transformer.h.*.attn.c_proj", "row"),
    ("transformer.h.*.mlp.c_fc", "column"),
    ("transformer.h.*.mlp.c_proj", "row"),
    ("transformer.ln_f", "sequence"),
    ("lm_head", "vocabulary"),
)

_BOTTLENECK = _table(
    ("layer*.conv1", "filter"),
    ("layer*.conv2", "column"),
    ("layer*.bn2", "channel"),
    ("layer*.conv3", "row"),
    ("layer*.downsample.0", "filter"),
    ("fc", "filter"),
    ("conv1", "filter"),
)

TABLES: Mapping[str, tuple[Rule, ...]] = MappingProxyType({"CausalLanguageModel": _GPT2, "ResNet": _BOTTLENECK})
"""Class name of the model → its table. Models not listed get ``chain_splits`` or, failing that, filter splits."""


def rule_for(name: str, table: Sequence[Rule]) -> Rule | None:
    """The first rule whose pattern matches the module's name."""
    return next((rule for rule in table if fnmatch.fnmatchcase(name, rule.pattern)), None)


def chain_splits(kinds: Sequence[str]) -> list[str]:
    """Splits for a plain chain of layers: matrix layers pair up as column and row, norms between them follow.

    Args:
        kinds: per layer ``matrix`` (linear or convolution), ``norm`` (per channel), ``pointwise`` (works on each
            channel alone: activation, pooling, flatten, dropout) or ``other``.

    Returns:
        Per layer a name from ``SPLITS``, or ``""`` for left whole.
    """
    splits = [""] * len(kinds)
    index = 0
    while index < len(kinds):
        if kinds[index] == "matrix":
            partner = _partner(kinds, index)
            splits[index] = "column" if partner else "filter"
            if partner:
                for between in range(index + 1, partner):
                    splits[between] = "channel" if kinds[between] == "norm" else ""
                splits[partner] = "row"
                index = partner
        index += 1
    return splits


def _partner(kinds: Sequence[str], start: int) -> int | None:
    for index in range(start + 1, len(kinds)):
        if kinds[index] == "matrix":
            return index
        if kinds[index] == "other":
            return None
    return None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one parameter lies on the tensor axis.

    Attributes:
        dim: the dim that is split; None where every device holds it whole.
        blocks: fused parts along ``dim`` (3 for query, key, value), each split by itself.
        full_size: length of ``dim`` before the split.
        partial: whole, but each device's gradient is one summand.
    """

    dim: int | None = None
    blocks: int = 1
    full_size: int = 0
    partial: bool = False


def part_ranges(layout: Layout, index: int, size: int) -> list[range]:
    """Where device ``index`` of ``size`` finds its part along ``layout.dim``: one range per block.

    A length that does not divide (a vocabulary) leaves the last devices a shorter part.
    """
    block = layout.full_size // layout.blocks
    part = -(-block // size)
    ranges = []
    for number in range(layout.blocks):
        start = min(index * part, block)
        stop = min(start + part, block)
        ranges.append(range(number * block + start, number * block + stop))
    return ranges

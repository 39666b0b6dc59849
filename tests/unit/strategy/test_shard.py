"""Shard tables: pairs of column and row, and parts that make up the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.run.state import merge
from meshwise.strategy.shard import Layout, chain_splits, part_ranges, rule_for


def test_matrix_layers_pair_up_and_norms_between_follow() -> None:
    kinds = ["matrix", "norm", "pointwise", "matrix", "norm", "pointwise", "matrix"]
    assert chain_splits(kinds) == ["column", "channel", "", "row", "", "", "filter"]


def test_a_layer_that_mixes_channels_breaks_a_pair() -> None:
    assert chain_splits(["matrix", "other", "matrix", "matrix"]) == ["filter", "", "column", "row"]


def test_rules_match_like_a_shell() -> None:
    from meshwise.strategy.shard import TABLES

    rule = rule_for("transformer.h.11.attn.c_attn", TABLES["CausalLanguageModel"])
    assert rule is not None
    assert (rule.split, rule.blocks) == ("column", 3)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6))
def test_parts_cover_the_whole_once(block_size: int, blocks: int, size: int) -> None:
    layout = Layout(dim=0, blocks=blocks, full_size=block_size * blocks)
    everything = [i for index in range(size) for r in part_ranges(layout, index, size) for i in r]
    assert sorted(everything) == list(range(block_size * blocks))


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 4))
def test_merging_undoes_splitting(block_size: int, blocks: int, size: int) -> None:
    whole = torch.arange(block_size * blocks * 2.0).view(2, -1)
    layout = Layout(dim=1, blocks=blocks, full_size=block_size * blocks)
    parts = []
    for index in range(size):
        indices = [i for r in part_ranges(layout, index, size) for i in r]
        parts.append(whole[:, indices])
    assert torch.equal(merge(parts, layout), whole)

"""How a module is cut into a chain, and a chain into stages."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwise.errors import ModelError
from meshwise.run.chain import balanced_cuts, blocks_of, chain_of, cut, facts


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_largest_stage_is_as_small_as_any_cut_can_make_it(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))

    def largest(bounds: tuple[int, ...] | list[int]) -> int:
        edges = [0, *bounds, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    found = balanced_cuts(costs, num_parts)
    best = min(largest(bounds) for bounds in itertools.combinations(range(1, len(costs)), num_parts - 1))
    assert largest(found) == best
    assert len(set(found)) == num_parts - 1


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "inception_v3"])
def test_a_torchvision_chain_composes_to_the_model(name: str) -> None:
    import torchvision

    options = {"init_weights": False} if name != "resnet18" else {}
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=3, **options).eval()
    x = torch.randn(1, 3, 299 if name == "inception_v3" else 64, 299 if name == "inception_v3" else 64)
    with torch.no_grad():
        expected, found = model(x), x
        for _, layer in chain_of(model):
            found = layer.eval()(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_module_of_unknown_shape_is_refused_with_what_would_do() -> None:
    with pytest.raises(ModelError, match="chain\\(\\) that returns"):
        chain_of(nn.Transformer(8, 1, 1, 1, 8))


def test_stages_are_cut_by_work_when_an_example_is_there() -> None:
    layers = [
        ("small", nn.Linear(8, 8)),
        ("wide", nn.Linear(8, 512)),
        ("back", nn.Linear(512, 8)),
        ("last", nn.Linear(8, 8)),
    ]
    assert [len(part) for part in cut(layers, 2, torch.zeros(4, 8))] == [2, 2]


def test_blocks_are_modules_that_the_model_itself_calls() -> None:
    from meshwise.zoo.gpt2 import build_gpt2

    model = build_gpt2(vocab_size=16, n_positions=8, n_embd=8, n_layer=3, n_head=2)
    assert set(blocks_of(model)) <= set(model.modules())
    assert len([b for b in blocks_of(model) if type(b).__name__ == "GPT2Block"]) == 3


def test_facts_name_heads_and_the_sequence_of_a_split_gpt2() -> None:
    from meshwise.zoo.gpt2 import build_gpt2

    with torch.device("meta"):
        model = build_gpt2(vocab_size=16, n_positions=8, n_embd=8, n_layer=3, n_head=2)
    sizes = dict(facts(model, "net", sequence_length=8).tensor_sizes)
    assert sizes["attention heads"] == 2
    assert sizes["positions in a sequence"] == 8


def test_facts_see_batch_norm_and_say_why_there_is_no_pipeline() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    known = facts(net, "net")
    assert known.has_batch_norm
    assert known.num_layers == 0
    assert "nn.Sequential" in known.no_pipeline

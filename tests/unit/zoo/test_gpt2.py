"""GPT-2 is Hugging Face's, cut into a chain."""

import logging

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwise.errors import ModelError
from meshwise.zoo.gpt2 import CausalLanguageModel, build_gpt2

SMALL = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": 50}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(0))


def hugging_face(**settings):
    return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **SMALL, **settings))


def test_chain_is_forward():
    model = build_gpt2(**SMALL, **NO_DROPOUT)
    hidden = IDS
    for _, layer in model.chain():
        hidden = layer(hidden)
    assert torch.equal(hidden, model(IDS))


def test_chain_names_are_the_parameters_own():
    model = build_gpt2(**SMALL)
    names = [name for name, _ in model.chain()]
    assert names == ["embedding", *(f"transformer.h.{i}" for i in range(3)), "transformer.ln_f", "lm_head"]


def test_blocks_in_the_chain_are_those_forward_calls():
    """Sharding and recomputation hook into them; an adapter around a block would never be called by ``forward``."""
    model = build_gpt2(**SMALL)
    assert [layer for _, layer in model.chain()[1:-2]] == list(model.transformer.h)


def test_each_link_turns_one_tensor_into_one():
    hidden = IDS
    for _, layer in build_gpt2(**SMALL).chain():
        hidden = layer(hidden)
        assert isinstance(hidden, torch.Tensor)


def test_chain_shares_every_parameter():
    model = build_gpt2(**SMALL)
    in_chain = {id(parameter) for _, layer in model.chain() for parameter in layer.parameters()}
    assert in_chain == {id(parameter) for parameter in model.parameters()}


def test_chain_sees_replaced_parts():
    model = build_gpt2(**SMALL)
    model.transformer.wte = nn.Embedding(50, 32)
    assert model.chain()[0][1].wte is model.transformer.wte


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_are_hugging_faces(implementation):
    reference = hugging_face(attn_implementation=implementation, **NO_DROPOUT)
    expected = reference(IDS).logits
    answer = CausalLanguageModel.wrap(reference)(IDS)
    # eager and sdpa sum in another order; with the same attention the answers are the same to the last bit
    tolerance = 0.0 if implementation == "sdpa" else 1e-6
    torch.testing.assert_close(answer, expected, rtol=tolerance, atol=tolerance)


def test_gradients_are_hugging_faces():
    reference = hugging_face(**NO_DROPOUT)
    reference(IDS).logits.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
    reference.zero_grad()
    model = CausalLanguageModel.wrap(reference)
    model(IDS).square().mean().backward()
    assert {name for name, _ in model.named_parameters()} == set(expected)
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def test_dropout_is_hugging_faces():
    reference = hugging_face()
    torch.manual_seed(1)
    expected = reference(IDS).logits
    torch.manual_seed(1)
    assert torch.equal(CausalLanguageModel.wrap(reference)(IDS), expected)


def test_state_dict_fits_hugging_face_both_ways():
    reference, model = hugging_face(), build_gpt2(**SMALL)
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    assert torch.equal(model.eval()(IDS), reference.eval()(IDS).logits)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_embeddings_are_tied(device):
    with torch.device(device):
        model = build_gpt2(**SMALL)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_later_token_does_not_change_earlier_logits():
    model = build_gpt2(**SMALL).eval()
    changed = IDS.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 50
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_transformers_has_nothing_to_warn_of(caplog, capsys):
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        build_gpt2(**SMALL)(IDS)
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
    assert not capsys.readouterr().err


def test_other_models_are_refused():
    with pytest.raises(ModelError, match="Linear is not a GPT-2 language model"):
        CausalLanguageModel.wrap(nn.Linear(2, 2))


def test_cross_attention_is_refused():
    with pytest.raises(ModelError, match="without add_cross_attention"):
        CausalLanguageModel.wrap(hugging_face(add_cross_attention=True))

"""GPT-2 as a chain of layers, with Hugging Face's own parts and parameter names.

ids [B, S] ─► embedding ─► transformer.h.0 ─► … ─► transformer.ln_f ─► lm_head ─► logits [B, S, V]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwise.errors import ModelError


class GPT2Embedding(nn.Module):
    """ids [B, S] → hidden [B, S, E]; shares the token and position tables and the dropout it is given."""

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[-1], device=ids.device)
        return self.drop(self.wte(ids) + self.wpe(positions))


class CausalLanguageModel(nn.Module):
    """``GPT2LMHeadModel`` reduced to ids → logits: no cache, no masks, no padding.

    The parts are transformers' and keep their names, so a state dict fits both. Attention must be one that is causal
    without a mask (``sdpa``); ``wrap`` sees to it.
    """

    def __init__(self, transformer: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.lm_head = lm_head

    @classmethod
    def wrap(cls, model: Any) -> CausalLanguageModel:
        """The parts of a ``GPT2LMHeadModel``, shared, not copied; its attention is switched from eager to sdpa.

        Raises:
            ModelError: not a ``GPT2LMHeadModel``, or one with cross-attention.
        """
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "transformer", None), "wte"):
            raise ModelError(f"{type(model).__name__} is not a GPT-2 language model; give a GPT2LMHeadModel")
        if model.config.add_cross_attention:
            raise ModelError(
                "GPT-2 with cross-attention needs an encoder's states; build it without add_cross_attention"
            )
        if model.config._attn_implementation == "eager":
            model.set_attn_implementation("sdpa")
        return cls(model.transformer, model.lm_head)

    def chain(self) -> list[tuple[str, nn.Module]]:
        """(name, layer) in order; each maps one tensor to one tensor and their composition is ``forward``.

        Made anew from the current parts at each call, so replaced parts are seen; layers share them with this module.
        """
        parts: Any = self.transformer
        return [
            ("embedding", GPT2Embedding(parts.wte, parts.wpe, parts.drop)),
            *((f"transformer.h.{index}", block) for index, block in enumerate(parts.h)),
            ("transformer.ln_f", parts.ln_f),
            ("lm_head", self.lm_head),
        ]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of ids [B, S]."""
        hidden = ids
        for _, layer in self.chain():
            hidden = layer(hidden)
        return hidden


def build_gpt2(**settings: Any) -> CausalLanguageModel:
    """GPT-2 with random weights from transformers' configuration, changed by ``settings``; embeddings are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if settings.get("vocab_size", GPT2Config().vocab_size) <= GPT2Config().eos_token_id:
        # The default begin and end tokens lie outside a smaller vocabulary, and transformers warns of them.
        settings = {"bos_token_id": None, "eos_token_id": None, **settings}
    fixed: dict[str, Any] = {"attn_implementation": "sdpa", "loss_type": "ForCausalLM", "use_cache": False}
    config = GPT2Config(**fixed, **settings)
    return CausalLanguageModel.wrap(GPT2LMHeadModel(config))

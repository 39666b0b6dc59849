"""GPT-2 from ``nn.Linear`` layers only, for DTensor's styles, with the weights of meshwise's; and its split.

Shapes: B batch, S sequence, E width, H heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        width = source.embed_dim
        self.head_size = source.head_dim
        weights, biases = source.c_attn.weight.split(width, 1), source.c_attn.bias.split(width)
        self.query, self.key, self.value = (linear(w, b) for w, b in zip(weights, biases))
        self.out = linear(source.c_proj.weight, source.c_proj.bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        parts = (layer(x_BSE).unflatten(-1, (-1, self.head_size)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.up = linear(source.c_fc.weight, source.c_fc.bias)
        self.down = linear(source.c_proj.weight, source.c_proj.bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSE), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm_1, self.attention = source.ln_1, Attention(source.attn)
        self.norm_2, self.feed = source.ln_2, Feed(source.mlp)

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.norm_1(x_BSE))
        return x_BSE + self.feed(self.norm_2(x_BSE))


class PlainGPT(nn.Module):
    """The same function as ``source``, a ``CausalLanguageModel``; takes over its weights."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        parts = source.transformer
        self.tokens, self.positions = parts.wte, parts.wpe
        self.blocks = nn.ModuleList([Block(block) for block in parts.h])
        self.norm, self.head = parts.ln_f, source.lm_head

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSE = self.tokens(ids_BS) + self.positions(torch.arange(ids_BS.shape[1]))
        for block in self.blocks:
            x_BSE = block(x_BSE)
        return self.head(self.norm(x_BSE))


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer from transformers' ``[inputs, outputs]`` weight."""
    layer = nn.Linear(*weight.shape)
    with torch.no_grad():
        layer.weight.copy_(weight.T)
        layer.bias.copy_(bias)
    return layer


def split(model: PlainGPT, mesh: DeviceMesh) -> None:
    """Column and row split, sequence-parallel norms, logits split over the vocabulary; in place."""
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    # parallelize_module makes two parameters of a tied one.
    model.head.weight = model.tokens.weight
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm_1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm_2": SequenceParallel(),
                "feed": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed.up": ColwiseParallel(),
                "feed.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )

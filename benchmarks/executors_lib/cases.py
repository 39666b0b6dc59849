"""What is trained: two models that take a fraction of a second a step on two cores, and their batches.

Every contestant calls ``build`` itself, so each has its own copy of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.zoo.gpt2 import build_gpt2
from meshwise.zoo.losses import cross_entropy

GPT_WIDTH, GPT_HEADS, GPT_BLOCKS, GPT_TOKENS, GPT_VOCABULARY, GPT_BATCH = 256, 8, 4, 128, 2048, 16
CNN_WIDTHS, CNN_HIDDEN, CNN_IMAGE, CNN_CLASSES, CNN_BATCH = (32, 64, 128), 1024, 32, 10, 64

loss = cross_entropy

OPTIMIZER: type[torch.optim.Optimizer] = torch.optim.AdamW
SETTINGS: dict[str, Any] = {"lr": 3e-4, "fused": True}
"""Fused, or updates of one tensor at a time would hide what the executors do: they take three times as long on CPU."""


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """What every contestant updates with."""
    return OPTIMIZER(parameters, **SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data.

    Attributes:
        build: the module, with the same weights at every call.
        batch: ``batch(number)``: inputs and targets of the whole global batch.
        global_batch_size: samples in it.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    global_batch_size: int


def _gpt() -> nn.Module:
    """meshwise's GPT-2, 4 blocks of width 256, 4.2 million parameters, tied embeddings; no dropout."""
    torch.manual_seed(0)
    return build_gpt2(
        vocab_size=GPT_VOCABULARY, n_positions=GPT_TOKENS, n_embd=GPT_WIDTH, n_layer=GPT_BLOCKS, n_head=GPT_HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
    )  # fmt: skip


def _gpt_batch(number: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(GPT_VOCABULARY, (GPT_BATCH, GPT_TOKENS + 1), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _cnn() -> nn.Module:
    """VGG-like: 6 convolutions with batch norm in 3 groups, 3 linear layers; 3 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in CNN_WIDTHS:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    side = CNN_IMAGE // 2 ** len(CNN_WIDTHS)
    layers += [nn.Flatten(), nn.Linear(channels * side * side, CNN_HIDDEN), nn.ReLU()]
    layers += [nn.Linear(CNN_HIDDEN, CNN_HIDDEN // 2), nn.ReLU(), nn.Linear(CNN_HIDDEN // 2, CNN_CLASSES)]
    return nn.Sequential(*layers)


def _cnn_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(CNN_BATCH, 3, CNN_IMAGE, CNN_IMAGE, generator=generator)
    return images, torch.randint(CNN_CLASSES, (CNN_BATCH,), generator=generator)


CASES = {
    "gpt": Case(name="gpt", build=_gpt, batch=_gpt_batch, global_batch_size=GPT_BATCH),
    "cnn": Case(name="cnn", build=_cnn, batch=_cnn_batch, global_batch_size=CNN_BATCH),
}

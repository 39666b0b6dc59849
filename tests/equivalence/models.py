"""Small models, real code paths: the zoo's GPT-2, and convolutional networks with batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwise.zoo.gpt2 import CausalLanguageModel
from meshwise.zoo.losses import cross_entropy

VOCABULARY, SEQUENCE, CLASSES = 61, 16, 10


def gpt2() -> nn.Module:
    """4 blocks, width 32, 4 heads, a vocabulary that divides by nothing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return CausalLanguageModel.wrap(GPT2LMHeadModel(config))


def cnn() -> nn.Module:
    """VGG-like: convolutions, batch norms and pools, then linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 8, 12, 12):
        # No bias before a batch norm: its gradient is zero in exact arithmetic, and Adam would magnify the rounding.
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 16),
        nn.ReLU(),
        nn.Linear(16, CLASSES),
    ]
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    """torchvision's bottleneck ResNet, one block per stage and narrow: branches, strides, batch norms."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8)


MODELS = {"gpt2": gpt2, "cnn": cnn, "resnet": resnet}


def batches(name: str, count: int, global_batch_size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        if name == "gpt2":
            ids = torch.randint(VOCABULARY, (global_batch_size, SEQUENCE + 1), generator=generator)
            made.append((ids[:, :-1], ids[:, 1:].contiguous()))
        else:
            size = 32 if name == "resnet" else 8
            images = torch.randn(global_batch_size, 3, size, size, generator=generator, dtype=torch.float64)
            made.append((images, torch.randint(CLASSES, (global_batch_size,), generator=generator)))
    return made


loss = cross_entropy

"""The reference models by name, and ``get_task``, which finds them and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.errors import ModelError, did_you_mean
from meshwise.zoo.gpt2 import build_gpt2
from meshwise.zoo.losses import cross_entropy, inception_cross_entropy
from meshwise.zoo.own import is_own, load_own
from meshwise.zoo.task import OptimizerDefaults, Task


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the user asked to differ from a task's defaults; None leaves the default."""

    sequence_length: int | None = None
    image_size: int | None = None
    num_classes: int | None = None


def get_task(
    name: str,
    *,
    sequence_length: int | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
) -> Task:
    """The task called ``name``: a key of ``TASKS``, or ``path/to/file.py:function`` (convention: ``zoo/own.py``).

    Raises:
        ModelError: unknown name, sizes that do not fit the model, or a file that does not give a model.
    """
    sizes = {"sequence_length": sequence_length, "image_size": image_size, "num_classes": num_classes}
    for size_name, size in sizes.items():
        if size is not None and size < 1:
            raise ModelError(f"{size_name}={size} is no size; use a whole number from 1")
    if not is_own(name) and name not in TASKS:
        raise ModelError(
            f"{name!r} is not a known model; "
            f"give a reference model or path/to/file.py:function ({did_you_mean(name, TASKS)})"
        )
    task = load_own(name, **sizes) if is_own(name) else TASKS[name](Sizes(**sizes))
    wrong, right = ("image_size", "text") if task.kind == "language" else ("sequence_length", "images")
    if sizes[wrong] is not None:
        raise ModelError(f"{name} takes {right} and has no {wrong}; leave {wrong} out")
    return task


def _gpt2(name: str, *, batch_size: int, optimizer: OptimizerDefaults, **settings: Any) -> Callable[[Sizes], Task]:
    """Trains on ``n_positions`` tokens unless told otherwise; the position table only ever grows."""

    def task(sizes: Sizes) -> Task:
        length = sizes.sequence_length or settings["n_positions"]
        vocabulary_size = sizes.num_classes or settings["vocab_size"]
        changed = {**settings, "n_positions": max(length, settings["n_positions"]), "vocab_size": vocabulary_size}
        return Task(
            name=name,
            kind="language",
            build=lambda: build_gpt2(**changed),
            loss=cross_entropy,
            num_classes=vocabulary_size,
            default_data="stdlib",
            default_global_batch_size=batch_size,
            sequence_length=length,
            optimizer=optimizer,
        )

    return task


def _image(
    name: str,
    build: Callable[[int], nn.Module],
    *,
    sizes: Sizes,
    smallest_image_size: int,
    **defaults: Any,
) -> Task:
    """An image task; ``build`` takes the number of classes, which ``sizes`` may change, as it may the image size."""
    image_size = sizes.image_size or defaults.pop("image_size")
    num_classes = sizes.num_classes or defaults.pop("num_classes")
    if image_size < smallest_image_size:
        raise ModelError(
            f"images of {image_size} pixels are too small for {name}, which shrinks them to nothing; "
            f"use at least {smallest_image_size}"
        )
    return Task(
        **{
            "loss": cross_entropy,
            **defaults,
            "name": name,
            "kind": "image",
            "build": lambda: build(num_classes),
            "num_classes": num_classes,
            "image_size": image_size,
        }
    )


def _vgg16_module(num_classes: int) -> nn.Module:
    from torchvision.models import vgg16

    return _not_in_place(vgg16(num_classes=num_classes))


def _vgg16_tiny_module(num_classes: int) -> nn.Module:
    """VGG-16's 13 convolutions at an eighth of the width, with batch norm, and 3 linear layers of 64; no dropout."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    narrow = [width if width == "M" else int(width) // 8 for width in cfgs["D"]]
    hidden = 64
    features = make_layers(narrow, batch_norm=True)
    output = nn.Linear(hidden, num_classes)
    classifier = nn.Sequential(
        *(nn.Linear(narrow[-2], hidden), nn.ReLU(), nn.Dropout(0.0)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.0)),
        output,
    )
    for layer in [*features, *classifier]:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    # As torchvision does for every linear layer; for 64 inputs that small a deviation would silence the hidden ones.
    nn.init.normal_(output.weight, 0, 0.01)
    with torch.device("meta"):  # the constructor makes 4096-wide linear layers, half a gigabyte, which are not kept
        module = VGG(features, init_weights=False)
    module.avgpool, module.classifier = nn.AdaptiveAvgPool2d(1), classifier
    return _not_in_place(module)


def _not_in_place(module: nn.Module) -> nn.Module:
    """ReLU writes a new tensor: a pipeline may cut just before one, and a received tensor must not be overwritten."""
    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return module


def _resnet50_module(num_classes: int) -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=num_classes)


def _inception_v3_module(num_classes: int) -> nn.Module:
    from torchvision.models import inception_v3

    return inception_v3(num_classes=num_classes, aux_logits=True, init_weights=True)


def _vgg16(sizes: Sizes) -> Task:
    return _image(
        "vgg16",
        _vgg16_module,
        sizes=sizes,
        smallest_image_size=32,
        image_size=224,
        num_classes=1000,
        default_data="digits",
        default_global_batch_size=32,
        # Simonyan and Zisserman 2015, section 3.1: 0.01, momentum 0.9, weight decay 5e-4 (at a batch of 256).
        optimizer=OptimizerDefaults(name="sgd", learning_rate=0.01, weight_decay=5e-4, warm_up_steps=100),
    )


def _vgg16_tiny(sizes: Sizes) -> Task:
    return _image(
        "vgg16-tiny",
        _vgg16_tiny_module,
        sizes=sizes,
        smallest_image_size=32,
        image_size=32,
        num_classes=10,
        default_data="digits",
        default_global_batch_size=64,
        # Measured on digits: at 0.05 the running statistics of batch norm fall behind and validation is erratic.
        optimizer=OptimizerDefaults(name="sgd", learning_rate=0.02, warm_up_steps=20),
    )


def _resnet50(sizes: Sizes) -> Task:
    return _image(
        "resnet50",
        _resnet50_module,
        sizes=sizes,
        smallest_image_size=32,
        image_size=224,
        num_classes=1000,
        default_data="digits",
        default_global_batch_size=32,
        # Goyal et al. 2017, section 2.1: 0.1 per 256 samples, scaled linearly to the batch.
        optimizer=OptimizerDefaults(name="sgd", learning_rate=0.0125, weight_decay=1e-4),
    )


def _inception_v3(sizes: Sizes) -> Task:
    return _image(
        "inception_v3",
        _inception_v3_module,
        sizes=sizes,
        smallest_image_size=299,  # the auxiliary head needs 17 × 17 positions where it branches off
        image_size=299,
        num_classes=1000,
        loss=inception_cross_entropy,
        default_data="digits",
        default_global_batch_size=32,
        optimizer=OptimizerDefaults(name="sgd", learning_rate=0.0125, weight_decay=1e-4),
    )


# Brown et al. 2020, table 2.1: 6e-4 for 125M, 3e-4 for 350M parameters.
_gpt2_medium = _gpt2(
    "gpt2-medium",
    batch_size=8,
    optimizer=OptimizerDefaults(learning_rate=3e-4, weight_decay=0.1, warm_up_steps=100),
    n_layer=24,
    n_embd=1024,
    n_head=16,
    n_positions=1024,
    vocab_size=50257,
)
_gpt2_small = _gpt2(
    "gpt2-small",
    batch_size=8,
    optimizer=OptimizerDefaults(learning_rate=6e-4, weight_decay=0.1, warm_up_steps=100),
    n_layer=12,
    n_embd=768,
    n_head=12,
    n_positions=1024,
    vocab_size=50257,
)
_gpt2_tiny = _gpt2(
    "gpt2-tiny",
    batch_size=32,
    optimizer=OptimizerDefaults(learning_rate=1e-3),
    n_layer=8,
    n_embd=64,
    n_head=4,
    n_positions=64,
    vocab_size=256,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)

TASKS: dict[str, Callable[[Sizes], Task]] = {
    "gpt2-medium": _gpt2_medium,
    "gpt2-small": _gpt2_small,
    "gpt2-tiny": _gpt2_tiny,
    "vgg16": _vgg16,
    "vgg16-tiny": _vgg16_tiny,
    "resnet50": _resnet50,
    "inception_v3": _inception_v3,
}
"""Every reference model. A new one is a function from ``Sizes`` to ``Task`` and a line here."""

"""A task: a model with what it takes to train it sensibly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwise.errors import ModelError

Loss = Callable[[Any, Tensor], Tensor]
Kind = Literal["language", "image"]


@dataclass(frozen=True, kw_only=True)
class OptimizerDefaults:
    """``name`` is ``sgd``, ``adam`` or ``adamw``; ``learning_rate`` is reached after ``warm_up_steps`` linear steps."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    warm_up_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model and how it is trained by default.

    Attributes:
        name: as the user writes it.
        kind: ``language`` (ids [B, S] → logits [B, S, V]) or ``image`` (pixels [B, 3, H, W] → logits [B, C]).
        build: the module with random weights; the caller sets seed, default dtype and device context around it.
        loss: ``loss(outputs, targets)``, the mean over samples or tokens.
        num_classes: classes, or vocabulary size.
        default_data: data text used where none is given.
        default_global_batch_size: samples per optimizer step.
        sequence_length: tokens of one sample; None for images.
        image_size: height and width in pixels; None for language.
        optimizer: what gives sensible curves at the default batch.

    Raises:
        ModelError: a language task without ``sequence_length`` or an image task without ``image_size``.
    """

    name: str
    kind: Kind
    build: Callable[[], nn.Module]
    loss: Loss
    num_classes: int
    default_data: str
    default_global_batch_size: int
    sequence_length: int | None = None
    image_size: int | None = None
    optimizer: OptimizerDefaults = OptimizerDefaults()

    def __post_init__(self) -> None:
        if self.kind not in ("language", "image"):
            raise ModelError(f"kind {self.kind!r} of {self.name} is unknown; use 'language' or 'image'")
        needed = "sequence_length" if self.kind == "language" else "image_size"
        for field in (needed, "num_classes", "default_global_batch_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{field}={value!r} of {self.name} is no size; use a whole number from 1")

    @property
    def metric(self) -> Literal["perplexity", "accuracy"]:
        return "perplexity" if self.kind == "language" else "accuracy"

    @property
    def sample_unit(self) -> Literal["tokens", "samples"]:
        """What throughput counts."""
        return "tokens" if self.kind == "language" else "samples"

    def example_inputs(self, batch_size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random inputs and targets of the right shapes; pixels are standard normal, in the default dtype.

        Language: int64 [B, S] twice, the targets being the inputs one token on. Image: [B, 3, H, W] and int64 [B].
        """
        if self.sequence_length is not None:
            ids = torch.randint(self.num_classes, (batch_size, self.sequence_length + 1), generator=generator)
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        size = self.image_size or 0
        pixels = torch.randn(batch_size, 3, size, size, generator=generator)
        return pixels, torch.randint(self.num_classes, (batch_size,), generator=generator)

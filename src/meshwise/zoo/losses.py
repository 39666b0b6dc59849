"""Losses of the reference models: means over samples or tokens, whatever shape the model's answer has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

AUXILIARY_WEIGHT = 0.4
"""Weight of Inception's auxiliary head, as in TensorFlow's slim and in PyTorch's fine-tuning tutorial."""


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's answer: itself, its ``logits`` (transformers, Inception) or its first element."""
    if isinstance(outputs, Tensor):
        return outputs
    if hasattr(outputs, "logits"):
        return outputs.logits
    if isinstance(outputs, (tuple, list)) and outputs:
        return logits_of(outputs[0])
    raise TypeError(f"the model returned {type(outputs).__name__}, which holds no logits; return a tensor of logits")


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits ``[…, classes]`` against class numbers ``[…]``."""
    logits = logits_of(outputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


# Tensor parallelism may compute this one on logits whose vocabulary is split.
cross_entropy.is_mean_cross_entropy = True  # type: ignore[attr-defined]


def inception_cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """``cross_entropy(main) + 0.4 cross_entropy(auxiliary)`` in training; the main head alone in evaluation."""
    loss = cross_entropy(outputs, targets)
    auxiliary = getattr(outputs, "aux_logits", None)  # torchvision answers with InceptionOutputs in training
    return loss if auxiliary is None else loss + AUXILIARY_WEIGHT * cross_entropy(auxiliary, targets)

"""Activation checkpointing: forget activations in forward, compute them again in backward [Chen 2016].

``selective`` keeps what matrix products, convolutions and attention gave (most of the time of a forward, a small part
of its bytes) and recomputes the rest [Korthikanti 2022].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
)


@functools.cache
def kept_operators() -> tuple[Any, ...]:
    """The operators whose results ``selective`` keeps: all of ``_KEPT_NAMES`` that this torch has."""
    packets = [getattr(torch.ops.aten, name) for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)]
    return tuple(packet.default for packet in packets)


def run_checkpointed(function: Callable[..., Any], *arguments: Any, mode: str) -> Any:
    """``function(*arguments)`` with its activations kept as ``mode`` says: ``none``, ``full`` or ``selective``.

    Under ``full`` and ``selective`` backward calls ``function`` a second time: it must read the same weights then, and
    must not change state a second time.
    """
    if mode == "none":
        return function(*arguments)
    if mode == "full":
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(kept_operators()))
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)

"""Activation checkpointing: forget activations in forward, compute them again in backward [Chen 2016].

``selective`` keeps what matrix products, convolutions and attention gave (most of the time of a forward, a small part
of its bytes) and recomputes the rest [Korthikanti 2022].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
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


def run_checkpointed(function: Callable[..., Any], *arguments: Any, mode: str, layer: nn.Module | None = None) -> Any:
    """``function(*arguments)`` with its activations kept as ``mode`` says: ``none``, ``full`` or ``selective``.

    Under ``full`` and ``selective`` backward calls ``function`` a second time: it must read the same weights then, and
    must not change state a second time. Batch norms of ``layer`` see to the latter themselves.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    contexts = functools.partial(_contexts, mode, layer)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: str) -> None:
    """Makes each of ``blocks`` keep only its input (``selective``: and matrix products) for backward, in place."""
    for block in blocks:
        block.forward = functools.partial(run_checkpointed, block.forward, mode=mode, layer=block)


def _contexts(mode: str, layer: nn.Module | None) -> tuple[Any, Any]:
    """What to enter around the forward, and around its recomputation."""
    forward: Any = contextlib.nullcontext()
    again: Any = contextlib.nullcontext()
    if mode == "selective":
        forward, again = create_selective_checkpoint_contexts(list(kept_operators()))
    return forward, _recomputing(again, layer)


@contextlib.contextmanager
def _recomputing(context: Any, layer: nn.Module | None) -> Iterator[None]:
    """The samples have been counted: batch norms do as before and leave their running statistics alone.

    With a momentum of zero, not with tracking off: the same operators must save the same tensors.
    """
    layers: Iterable[Any] = layer.modules() if layer is not None else ()
    norms = [module for module in layers if getattr(module, "track_running_stats", False)]
    kept = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        with context:
            yield
    finally:
        for norm, momentum, num_batches in kept:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(num_batches)

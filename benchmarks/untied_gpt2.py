"""gpt2-tiny with an output layer of its own, so that stale weights are the only thing PipeDream changes.

An asynchronous pipeline unties GPT-2's embedding and head (they live on different stages, which update at different
times). On a model this small that alone costs more than staleness, and would be mistaken for it.
"""

from typing import Any

from torch import nn


def gpt2() -> nn.Module:
    from meshwise.zoo.gpt2 import build_gpt2

    sizes: dict[str, Any] = {"n_layer": 8, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return build_gpt2(**sizes, **dropouts, tie_word_embeddings=False)


gpt2.task = {  # type: ignore[attr-defined]
    "kind": "language",
    "sequence_length": 64,
    "num_classes": 256,
    "default_global_batch_size": 32,
    "optimizer": {"name": "adamw", "learning_rate": 3e-3},
}

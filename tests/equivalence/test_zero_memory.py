"""Each ZeRO stage keeps what the paper says it keeps, on every rank [Rajbhandari et al. 2020, figure 1]."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from harness import spawn

FLOAT = 4
PADDING = 0.02
"""Buckets and shards are padded to a multiple of the replicas; on this small model that is below 2 %."""


def held_after_a_step(rank: int, text: str) -> tuple[int, int, int]:
    from meshwise.run.apply import parallelize

    torch.manual_seed(0)
    executor = parallelize(models.gpt2(), text, loss=models.loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    own, replicas = executor.groups.index("data"), executor.groups.size("data")
    inputs, targets = models.batches("gpt2", 1, 8)[0]
    executor.step(inputs.chunk(replicas)[own], targets.chunk(replicas)[own])
    held = executor.held()
    return held.parameters, held.gradients, held.optimizer_state


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("text", "parameters_sharded", "gradients_sharded", "state_sharded"),
    [
        ("data", False, False, False),
        ("zero1", False, False, True),
        ("zero2", False, True, True),
        ("zero3", True, True, True),
    ],
)
def test_a_rank_keeps_the_papers_share(
    text: str, parameters_sharded: bool, gradients_sharded: bool, state_sharded: bool, num_ranks: int
) -> None:
    size = sum(p.numel() for p in models.gpt2().parameters())

    def share(factor: int, sharded: bool) -> float:
        return factor * FLOAT * size / (num_ranks if sharded else 1)

    expected = (share(1, parameters_sharded), share(1, gradients_sharded), share(2, state_sharded))
    for rank, held in enumerate(spawn(held_after_a_step, num_ranks, text)):
        for what, ours, papers in zip(("parameters", "gradients", "optimizer state"), held, expected):
            assert ours == pytest.approx(papers, rel=PADDING), f"{what} of rank {rank}"

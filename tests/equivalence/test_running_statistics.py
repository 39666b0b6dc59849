"""Running statistics of batch norm: counted once, the same on every replica, and found again in the whole state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from harness import spawn


def statistics_after_steps(rank: int, text: str) -> dict[str, torch.Tensor]:
    from meshwise.run.apply import parallelize

    torch.manual_seed(0)
    executor = parallelize(
        models.cnn().double(), text, loss=models.loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
    )
    own, replicas = executor.groups.index("data"), executor.groups.size("data")
    for inputs, targets in models.batches("cnn", 3, 16):
        executor.step(inputs.chunk(replicas)[own], targets.chunk(replicas)[own])
    return {name: tensor for name, tensor in executor.state().items() if "running" in name}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("text", ["data", "data,batch_norm=sync", "1f1b"])
def test_recomputation_counts_no_sample_twice(text: str, mode: str) -> None:
    plain = spawn(statistics_after_steps, 2, text)[0]
    recomputed = spawn(statistics_after_steps, 2, f"{text},checkpointing={mode}")[0]
    assert len(plain) == 8
    for name, expected in plain.items():
        torch.testing.assert_close(recomputed[name], expected, rtol=1e-12, atol=0)


def test_synchronised_statistics_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    whole = models.cnn().double()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for inputs, targets in models.batches("cnn", 3, 16):
        optimizer.zero_grad()
        models.loss(whole(inputs), targets).backward()
        optimizer.step()
    together = spawn(statistics_after_steps, 2, "data,batch_norm=sync")[0]
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=1e-11, atol=0)

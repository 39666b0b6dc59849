"""bf16 is autocast around forward and loss under every strategy: a plain autocast loop's losses, up to rounding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from harness import spawn

STEPS = 6
ROUNDING = 2e-3
"""Relative. A bf16 product has 8 bits; sums in another order differ by about that, averaged over many tokens."""


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.gpt2()


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]


def losses_of(rank: int, text: str) -> list[float]:
    from meshwise.run.apply import parallelize

    executor = parallelize(build(), text, loss=models.loss, optimizer=optimizer)
    own, replicas = executor.groups.index("data"), executor.groups.size("data")
    results = []
    for inputs, targets in models.batches("gpt2", STEPS, 16):
        results.append(executor.step(inputs.chunk(replicas)[own], targets.chunk(replicas)[own]))
    return [float(result.loss) for result in results if result.loss is not None]


@pytest.mark.parametrize("text", ["data", "zero1", "zero3", "tensor", "1f1b", "gpipe"])
def test_mixed_precision_is_the_same_under_every_strategy(text: str) -> None:
    module = build()
    steps = optimizer(module.parameters())
    expected = []
    for inputs, targets in models.batches("gpt2", STEPS, 16):
        steps.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.loss(module(inputs), targets)
        loss.backward()
        steps.step()
        expected.append(float(loss.detach()))
    rows = [row for row in spawn(losses_of, 2, f"{text},precision=bf16") if row]
    found = [sum(column) / len(rows) for column in zip(*rows)]
    assert found == pytest.approx(expected, rel=ROUNDING)

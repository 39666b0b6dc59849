"""Parameters that a step does not use: their gradient is zero, not what memory held before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from harness import spawn


class Sometimes(nn.Module):
    """``extra`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def state_after_steps(rank: int, text: str) -> dict[str, Tensor]:
    from meshwise.run.apply import parallelize

    torch.manual_seed(0)
    executor = parallelize(
        Sometimes().double(),
        text,
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        clip_norm=1.0,
    )
    own, replicas = executor.groups.index("data"), executor.groups.size("data")
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(16, 5, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (16,), generator=generator)
        executor.step(x.chunk(replicas)[own], y.chunk(replicas)[own])
    return executor.state()


@pytest.mark.parametrize("text", ["zero1", "zero2", "zero1,micro_batches=2", "zero3"])
def test_an_unused_layer_stays_what_it_was(text: str) -> None:
    torch.manual_seed(0)
    before = Sometimes().double().state_dict()
    after = spawn(state_after_steps, 2, text)[0]
    assert torch.equal(after["extra.weight"], before["extra.weight"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_zero2_names_the_unused_layer_where_it_cannot_accumulate() -> None:
    with pytest.raises(AssertionError, match=r"extra\.\w+.* got no gradient.*use zero=1"):
        spawn(state_after_steps, 2, "zero2,micro_batches=2")

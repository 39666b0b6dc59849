"""The same executors on CUDA devices; one device suffices for the first, two for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_one_device_trains_as_the_cpu_does() -> None:
    from meshwise.run.apply import parallelize

    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        executor = parallelize(
            net,
            "single,precision=fp64",
            loss=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            device=device,
        )
        x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
        y = torch.arange(16, device=device) % 4
        losses.append([float(executor.step(x, y).loss) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("strategy", ["data", "zero1", "zero2", "zero3", "tensor", "1f1b", "pipedream"])
def test_two_devices_run_every_family(strategy: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(EXAMPLE), strategy], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "epoch 5" in done.stdout

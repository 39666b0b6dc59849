"""The small decisions of a rank: whose fault an exception is, who validates what, how the learning rate starts."""

from __future__ import annotations

import pytest
import torch

from meshwise.errors import DataError
from meshwise.run.agreement import Agreement
from meshwise.run.job import OptimizerSettings
from meshwise.run.train import Optimizers, validation_slices
from meshwise.run.worker import cause_of


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            "out of memory",
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "out of memory"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), "peer"),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), "peer"),
        (torch.distributed.DistBackendError("NCCL error"), "peer"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (ValueError("connection reset"), "error"),
        (DataError("no such data; use digits"), "input"),
    ],
)
def test_causes_are_told_apart(error, cause):
    assert cause_of(error) == cause


@pytest.mark.parametrize("num_samples", [4, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_every_sample_is_validated_once_and_every_replica_has_as_many_batches(num_samples, replicas):
    parts = [
        validation_slices(num_samples, batch_size=8, replicas=replicas, replica=replica) for replica in range(replicas)
    ]
    assert sorted(index for part in parts for batch in part for index in batch) == list(range(num_samples))
    assert len({len(part) for part in parts}) == 1
    assert all(len(batch) > 0 for part in parts for batch in part)


def test_too_few_samples_to_validate_on_are_refused():
    with pytest.raises(DataError, match="use at least 4"):
        validation_slices(3, batch_size=8, replicas=4, replica=0)


def test_the_learning_rate_rises_in_a_line_and_stays():
    optimizers = Optimizers(OptimizerSettings(name="sgd", learning_rate=0.8, warm_up_steps=4))
    made = [optimizers([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2)]
    rates = []
    for step in range(6):
        optimizers.warm_up(step)
        rates.append([one.param_groups[0]["lr"] for one in made])
    assert rates == [[pytest.approx(rate)] * 2 for rate in (0.2, 0.4, 0.6, 0.8, 0.8, 0.8)]


def test_without_warm_up_the_first_step_has_the_whole_rate():
    optimizers = Optimizers(OptimizerSettings(name="adamw", learning_rate=0.5))
    made = optimizers([torch.nn.Parameter(torch.zeros(1))])
    optimizers.warm_up(0)
    assert made.param_groups[0]["lr"] == 0.5


def test_one_rank_agrees_with_itself_at_once():
    from datetime import timedelta

    agreement = Agreement(timedelta(seconds=1))
    assert agreement.report(1, finite=True) is None
    assert agreement.report(2, finite=False) == 2
    assert agreement.settle() is None
    assert agreement.sums([1.0, 2.0]) == [1.0, 2.0]

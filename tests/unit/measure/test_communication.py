"""Bytes by kind of collective, on one process: a group of one still makes its calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from meshwise.measure.communication import OPERATORS, CommunicationCounter


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process only."""
    path = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bytes_of(action) -> dict[str, tuple[int, int]]:
    with CommunicationCounter() as counter:
        action()
    return {kind: (count.calls, count.bytes) for kind, count in counter.counts.items()}


def test_every_operator_torch_has_is_known():
    """A collective of a new torch must not go uncounted."""
    silent = {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "c10d::check_for_nan",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "_c10d_functional::batch_p2p_ops",  # for torch.compile only; eager code sends through c10d
    }
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    there = {name for name in names if name.startswith(("c10d::", "_c10d_functional::"))}
    assert there - silent <= set(OPERATORS)


def test_all_reduce_counts_what_is_handed_in(alone):
    assert bytes_of(lambda: dist.all_reduce(torch.ones(10))) == {"all_reduce": (1, 40)}
    assert bytes_of(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64))) == {"all_reduce": (1, 24)}


def test_all_gather_counts_what_comes_out_and_reduce_scatter_what_goes_in(alone):
    out, part = torch.empty(8), torch.ones(8)
    assert bytes_of(lambda: dist.all_gather_into_tensor(out, part)) == {"all_gather": (1, 32)}
    assert bytes_of(lambda: dist.all_gather([out], part)) == {"all_gather": (1, 32)}
    assert bytes_of(lambda: dist.reduce_scatter_tensor(out, part)) == {"reduce_scatter": (1, 32)}


def test_broadcast_counts_on_the_rank_that_has_the_data(alone):
    assert bytes_of(lambda: dist.broadcast(torch.ones(5), src=0)) == {"broadcast": (1, 20)}


def test_all_to_all_counts_what_is_handed_in(alone):
    assert bytes_of(lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6))) == {"all_to_all": (1, 24)}


def test_functional_collectives_count_alike(alone):
    group = dist.group.WORLD
    assert bytes_of(lambda: functional.all_reduce(torch.ones(10), "sum", group).add(1)) == {"all_reduce": (1, 40)}
    gathered = bytes_of(lambda: functional.all_gather_tensor(torch.ones(4), 0, group).add(1))
    assert gathered == {"all_gather": (1, 16)}


def test_a_dtensors_own_collectives_are_seen(alone):
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False)
    with CommunicationCounter() as counter:
        (sharded + 1).redistribute(mesh, [Replicate()]).to_local().sum()
    # A mesh of one gathers nothing or its own 64 B, as torch likes; the point is that DTensor code runs under the mode.
    assert sum(count.bytes for count in counter.counts.values()) in (0, 64)


def test_nothing_is_counted_outside(alone):
    with CommunicationCounter() as counter:
        torch.ones(3) + 1
    dist.all_reduce(torch.ones(10))
    assert counter.counts == {}

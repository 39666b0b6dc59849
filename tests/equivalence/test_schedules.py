"""Our schedules, written from the papers, order the work as torch's do. No processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from meshwise.strategy import Action, Schedule, Strategy, schedule_for

Work = list[tuple[str, int, int]]


def torch_work(actions: list[Any]) -> Work:
    """Torch's actions without its waits and gradient reductions."""
    kinds = {torch_schedules.FORWARD: "forward", torch_schedules.FULL_BACKWARD: "backward"}
    return [
        (kinds[action.computation_type], action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type in kinds
    ]


def our_work(actions: tuple[Action, ...]) -> Work:
    return [(action.kind, action.stage, action.micro_batch) for action in actions if action.kind != "update"]


class Recorder:
    """A pipeline stage for torch's executors that writes down what it is told to do, and computes nothing."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.work: Work = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.work.append(("forward", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.work.append(("backward", self.stage_index, micro_batch))

    def no_operations(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = no_operations


def torch_single(name: str, num_stages: int, num_micro_batches: int) -> list[Work]:
    """What torch's executor really does on each stage.

    Its printed table (``pipeline_order``) is not that: in torch 2.14 it numbers the last 1F1B stage's forwards from 1.
    """

    class Dry(getattr(torch_schedules, name)):  # type: ignore[misc]
        def __init__(self, stage: Recorder) -> None:
            self._stage, self._num_stages, self._n_microbatches = stage, num_stages, num_micro_batches
            self.scale_grads = False

        def _check_inputs(self, *_: Any) -> tuple[list[Any], list[Any]]:
            return [()] * num_micro_batches, [{}] * num_micro_batches

        def nothing(self, *_: Any) -> None:
            return None

        _initialize_stage = _maybe_compute_loss = _maybe_get_loss = _update_losses = nothing

    stages = [Recorder(index) for index in range(num_stages)]
    for stage in stages:
        Dry(stage)._step_microbatches()
    return [stage.work for stage in stages]


def torch_interleaved(num_devices: int, virtual: int, num_micro_batches: int) -> dict[int, list[Any]]:
    schedule = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages = num_devices, virtual
    schedule._n_microbatches = num_micro_batches
    schedule.number_of_rounds = max(1, num_micro_batches // num_devices)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    return {device: schedule._calculate_single_rank_operations(device) for device in range(num_devices)}


def ours(schedule: str, num_devices: int, num_micro_batches: int, virtual: int = 1) -> Schedule:
    return schedule_for(
        Strategy(
            pipeline_parallel_size=num_devices,
            schedule=schedule,
            num_virtual_stages=virtual,
            num_micro_batches=num_micro_batches,
        )
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 12])
@pytest.mark.parametrize(("name", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_gpipe_and_1f1b_are_torchs(name: str, theirs: str, num_stages: int, extra: int) -> None:
    expected = torch_single(theirs, num_stages, num_stages + extra)
    found = ours(name, num_stages, num_stages + extra)
    assert [our_work(actions) for actions in found.devices] == expected


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_interleaved_is_torchs(num_devices: int, virtual: int, rounds: int) -> None:
    expected = torch_interleaved(num_devices, virtual, rounds * num_devices)
    found = ours("interleaved", num_devices, rounds * num_devices, virtual)
    assert [our_work(actions) for actions in found.devices] == [torch_work(expected[d]) for d in range(num_devices)]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["pipedream", "pipedream-vsync", "pipedream-2bw"])
def test_asynchronous_pipelines_work_in_the_order_of_torchs_1f1b(name: str, num_stages: int) -> None:
    """What differs is when weights are updated, and that the next step begins before the last has drained."""
    expected = torch_single("Schedule1F1B", num_stages, 2 * num_stages)
    found = ours(name, num_stages, 2 * num_stages)
    assert [our_work(actions) for actions in found.devices] == expected


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(num_micro_batches: int) -> None:
    expected = torch_single("Schedule1F1B", 4, num_micro_batches)
    assert [our_work(actions) for actions in ours("1f1b", 4, num_micro_batches).devices] == expected

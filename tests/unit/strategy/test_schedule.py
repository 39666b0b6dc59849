"""Properties that every pipeline schedule must have, played without processes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategy import Schedule, Strategy, schedule_for
from meshwise.strategy.schedule import forward_version, warm_up_forwards, weight_versions

ASYNCHRONOUS = ("pipedream", "pipedream-vsync", "pipedream-2bw")


@st.composite
def pipelines(
    draw: st.DrawFn, schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", *ASYNCHRONOUS)
) -> Strategy:
    schedule = draw(st.sampled_from(schedules))
    size = draw(st.integers(2, 6))
    micro_batches = draw(st.integers(1, 12))
    if schedule == "interleaved":
        micro_batches = size * draw(st.integers(1, 3))
    if schedule == "pipedream-2bw":
        micro_batches += size - 1
    return Strategy(
        pipeline_parallel_size=size,
        schedule=schedule,
        num_virtual_stages=draw(st.integers(2, 4)) if schedule == "interleaved" else 1,
        num_micro_batches=micro_batches,
    )


def play(schedule: Schedule) -> None:
    """Runs every device as far as it can: a forward needs the stage before, a backward its forward and the stage after.

    Raises AssertionError where devices that block on what they need would wait for each other for ever.
    """
    done: set[tuple[str, int, int]] = set()
    position = [0] * schedule.num_devices
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(schedule.devices):
            while position[device] < len(actions):
                action = actions[position[device]]
                needs = set()
                if action.kind == "forward" and action.stage:
                    needs = {("forward", action.stage - 1, action.micro_batch)}
                if action.kind == "backward":
                    needs = {("forward", action.stage, action.micro_batch)}
                    if action.stage < schedule.num_stages - 1:
                        needs.add(("backward", action.stage + 1, action.micro_batch))
                if not needs <= done:
                    break
                done.add((action.kind, action.stage, action.micro_batch))
                position[device] += 1
                moved = True
    stuck = [str(actions[at]) for actions, at in zip(schedule.devices, position) if at < len(actions)]
    assert not stuck, f"waiting for ever: {stuck}"


@given(pipelines())
def test_every_micro_batch_goes_once_forward_and_once_back_through_every_stage(strategy: Strategy) -> None:
    schedule = schedule_for(strategy)
    work = Counter(
        (a.kind, a.stage, a.micro_batch) for actions in schedule.devices for a in actions if a.kind != "update"
    )
    assert work == Counter(
        (kind, stage, micro_batch)
        for kind in ("forward", "backward")
        for stage in range(strategy.num_stages)
        for micro_batch in range(strategy.num_micro_batches)
    )


@given(pipelines())
def test_devices_that_block_on_receives_never_wait_for_ever(strategy: Strategy) -> None:
    play(schedule_for(strategy))


@given(pipelines())
def test_a_device_holds_its_own_stages(strategy: Strategy) -> None:
    size = strategy.pipeline_parallel_size
    for device, actions in enumerate(schedule_for(strategy).devices):
        assert {action.stage for action in actions} == set(range(device, strategy.num_stages, size))


@given(pipelines(("gpipe", "1f1b", "interleaved")))
def test_synchronous_schedules_update_once_at_the_end(strategy: Strategy) -> None:
    for actions in schedule_for(strategy).devices:
        kinds = [action.kind for action in actions]
        updates = strategy.num_virtual_stages
        assert kinds[-updates:] == ["update"] * updates
        assert kinds.count("update") == updates


@given(pipelines())
def test_live_activations_are_the_theorys(strategy: Strategy) -> None:
    schedule, size = schedule_for(strategy), strategy.pipeline_parallel_size
    for device in range(size):
        live, micro_batches = schedule.live_micro_batches(device), strategy.num_micro_batches
        if strategy.schedule == "gpipe":
            assert live == micro_batches
        elif strategy.schedule == "interleaved":
            warm_up = (strategy.num_virtual_stages - 1) * size + 2 * (size - 1 - device)
            assert live == min(warm_up + 1, strategy.num_virtual_stages * micro_batches)
        else:
            assert live == min(size - device, micro_batches)


@given(pipelines(ASYNCHRONOUS))
def test_versions_used_exist_and_are_no_more_than_the_theory_allows(strategy: Strategy) -> None:
    """Plays the updates: which versions are still wanted by a backward or a later forward, or are the newest."""
    schedule = schedule_for(strategy, num_micro_batches=4 * strategy.num_micro_batches + 8)
    for stage, actions in enumerate(schedule.devices):
        newest = peak = 0
        for index, action in enumerate(actions):
            version = forward_version(strategy, stage, action.micro_batch)
            if action.kind == "forward":
                assert version <= newest
            if action.kind == "update":
                newest += 1
            wanted = {
                forward_version(strategy, stage, a.micro_batch) for a in actions[index + 1 :] if a.kind != "update"
            }
            peak = max(peak, len({v for v in wanted if v < newest} | {newest}))
        assert peak == weight_versions(strategy, stage)


@given(pipelines(ASYNCHRONOUS), st.integers(0, 60))
def test_vertical_sync_and_2bw_give_all_stages_one_version(strategy: Strategy, micro_batch: int) -> None:
    versions = [forward_version(strategy, stage, micro_batch) for stage in range(strategy.num_stages)]
    if strategy.schedule == "pipedream":
        assert versions[-1] == micro_batch  # the last stage is never stale
        assert versions == sorted(versions)
    else:
        assert len(set(versions)) == 1


def test_delay_of_2bw_is_one_update_everywhere() -> None:
    strategy = Strategy(pipeline_parallel_size=4, schedule="pipedream-2bw", num_micro_batches=4)
    assert [forward_version(strategy, 0, micro_batch) for micro_batch in range(16)] == [0] * 8 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("gpipe", "F0@0 F1@0 F2@0 B0@0 B1@0 B2@0 U0@0"),
        ("1f1b", "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0 U0@0"),
        ("pipedream", "F0@0 F1@0 B0@0 U0@0 F2@0 B1@0 U1@0 B2@0 U2@0"),
        ("pipedream-2bw", "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0 U0@0"),
    ],
)
def test_the_first_of_two_stages_reads_as_in_the_papers(schedule: str, expected: str) -> None:
    strategy = Strategy(pipeline_parallel_size=2, schedule=schedule, num_micro_batches=3)
    assert " ".join(map(str, schedule_for(strategy).devices[0])) == expected


def test_without_a_pipeline_micro_batches_accumulate() -> None:
    schedule = schedule_for(Strategy(num_micro_batches=2))
    assert " ".join(map(str, schedule.devices[0])) == "F0@0 B0@0 F1@0 B1@0 U0@0"
    assert schedule.bubble_fraction == 0


@pytest.mark.parametrize(
    ("size", "virtual", "micro_batches", "expected"),
    [(4, 1, 4, 3 / 7), (4, 1, 8, 3 / 11), (4, 2, 4, 3 / 11), (2, 1, 1, 0.5)],
)
def test_bubble_is_narayanans(size: int, virtual: int, micro_batches: int, expected: float) -> None:
    schedule = "1f1b" if virtual == 1 else "interleaved"
    strategy = Strategy(
        pipeline_parallel_size=size, schedule=schedule, num_virtual_stages=virtual, num_micro_batches=micro_batches
    )
    assert schedule_for(strategy).bubble_fraction == pytest.approx(expected)


@given(pipelines(("gpipe", "1f1b")))
def test_bubble_formula_is_what_playing_the_schedule_gives(strategy: Strategy) -> None:
    """Forward and backward of one unit each, instant links: idle share of the time until the last device is done."""
    schedule = schedule_for(strategy)
    makespan = finish_time(schedule)
    busy = 2 * strategy.num_micro_batches
    assert (makespan - busy) / makespan == pytest.approx(schedule.bubble_fraction)


def finish_time(schedule: Schedule) -> int:
    end: dict[tuple[str, int, int], int] = {}
    clock = [0] * schedule.num_devices
    position = [0] * schedule.num_devices
    while any(at < len(actions) for at, actions in zip(position, schedule.devices)):
        for device, actions in enumerate(schedule.devices):
            if position[device] == len(actions):
                continue
            action = actions[position[device]]
            neighbour = {"forward": action.stage - 1, "backward": action.stage + 1}.get(action.kind, -1)
            needs = (action.kind, neighbour, action.micro_batch)
            if 0 <= neighbour < schedule.num_stages and needs not in end:
                continue
            if action.kind != "update":
                clock[device] = max(clock[device], end.get(needs, 0)) + 1
                end[(action.kind, action.stage, action.micro_batch)] = clock[device]
            position[device] += 1
    return max(clock)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_the_last_stage_needs_no_warm_up(num_stages: int) -> None:
    assert [warm_up_forwards(stage, num_stages) for stage in range(num_stages)] == list(range(num_stages))[::-1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_schedules_that_flush_hold_one_version(schedule: str) -> None:
    strategy = Strategy(pipeline_parallel_size=4, schedule=schedule, num_micro_batches=4)
    assert [weight_versions(strategy, stage) for stage in range(4)] == [1] * 4
    assert [forward_version(strategy, 0, micro_batch) for micro_batch in range(8)] == [0] * 4 + [1] * 4

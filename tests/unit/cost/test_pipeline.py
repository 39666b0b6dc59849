"""A played schedule, against closed forms and against what must hold for any schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cost.pipeline import StageTime, Timeline, play, steady_time
from meshwise.errors import StrategyError
from meshwise.strategy import Strategy
from meshwise.strategy.schedule import Action, Schedule, schedule_for

FLUSHED = ("gpipe", "1f1b")


def schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    strategy = Strategy(
        pipeline_parallel_size=stages, schedule=name, num_micro_batches=micro_batches, num_virtual_stages=virtual
    )
    return schedule_for(strategy)


def equal(stages: int, forward: float = 1.0, backward: float = 2.0) -> list[StageTime]:
    return [StageTime(forward=forward, backward=backward)] * stages


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_equal_stages_take_m_plus_n_minus_1_rounds(name: str, stages: int, micro_batches: int) -> None:
    timeline = play(schedule(name, stages, micro_batches), equal(stages))
    assert timeline.makespan == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert timeline.bubble_fraction == pytest.approx(schedule(name, stages, micro_batches).bubble_fraction)


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(stages: int, micro_batches: int, virtual: int) -> None:
    order = schedule("interleaved", stages, micro_batches, virtual)
    timeline = play(order, equal(stages * virtual, 1.0, 1.0))
    assert timeline.makespan == pytest.approx(2 * (virtual * micro_batches + stages - 1))
    assert timeline.bubble_fraction == pytest.approx(order.bubble_fraction)


def test_no_pipeline_is_a_sum() -> None:
    one = schedule_for(Strategy(num_micro_batches=5))
    timeline = play(one, [StageTime(forward=1.0, backward=2.0, update=0.5)])
    assert timeline.makespan == pytest.approx(5 * 3 + 0.5)
    assert timeline.bubble_fraction == 0


@given(
    name=st.sampled_from(["gpipe", "1f1b", "pipedream", "pipedream-2bw"]),
    micro_batches=st.integers(4, 9),
    times=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=2, max_size=4),
    send=st.floats(0, 3),
)
def test_what_holds_for_every_timeline(
    name: str, micro_batches: int, times: list[tuple[float, float]], send: float
) -> None:
    stages = [StageTime(forward=f, backward=b, update=0.1) for f, b in times]
    order = schedule(name, len(stages), micro_batches)
    timeline = play(order, stages, send_time=send)
    for device in range(len(stages)):
        previous = 0.0
        for played in timeline.devices[device]:
            assert played.start >= previous
            previous = played.stop
        assert tuple(p.action for p in timeline.devices[device]) == order.devices[device]
        assert timeline.makespan >= timeline.busy(device) - 1e-9
    chain = sum(f + b for f, b in times) + 2 * (len(times) - 1) * send
    assert timeline.makespan >= chain - 1e-9
    assert _arrivals_respected(timeline, send)
    assert play(order, stages, send_time=send + 1).makespan >= timeline.makespan


def _arrivals_respected(timeline: Timeline, send: float) -> bool:
    ends = {(p.action.kind, p.action.stage, p.action.micro_batch): p.stop for d in timeline.devices for p in d}
    for device in timeline.devices:
        for played in device:
            kind, stage, index = played.action.kind, played.action.stage, played.action.micro_batch
            source = (kind, stage + (-1 if kind == "forward" else 1), index)
            if kind != "update" and source in ends and played.start < ends[source] + send - 1e-9:
                return False
    return True


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [StageTime(forward=1, backward=1), StageTime(forward=2, backward=2), StageTime(forward=1, backward=1)]
    many = [play(schedule("1f1b", 3, m), stages).makespan for m in (20, 21)]
    assert many[1] - many[0] == pytest.approx(4)
    assert steady_time(stages) == pytest.approx(4)


def test_a_hop_shows_in_steady_state_only_when_it_outlasts_what_is_in_flight() -> None:
    assert steady_time(equal(2), send_time=0.5) == pytest.approx(3.5)
    assert steady_time(equal(2)) == pytest.approx(3)
    assert steady_time([StageTime(forward=1, backward=1), *equal(1)], send_time=0.5) == pytest.approx(3)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@given(times=st.lists(st.floats(0.5, 4), min_size=2, max_size=4), send=st.floats(0, 2))
def test_a_long_played_pipeline_reaches_the_steady_pace(name: str, times: list[float], send: float) -> None:
    stages = [StageTime(forward=t, backward=2 * t) for t in times]
    spans = [play(schedule(name, len(times), m), stages, send_time=send).makespan for m in (40, 80)]
    assert (spans[1] - spans[0]) / 40 == pytest.approx(steady_time(stages, send_time=send), rel=0.03)


def test_an_order_that_waits_for_itself_is_refused() -> None:
    backward_first = Schedule(
        name="wrong",
        num_devices=1,
        num_virtual_stages=1,
        num_micro_batches=1,
        devices=((Action("backward", 0, 0), Action("forward", 0, 0)),),
    )
    with pytest.raises(StrategyError, match="never ends: B0@0 waits"):
        play(backward_first, equal(1))
    with pytest.raises(StrategyError, match="3 stage times for a schedule of 2"):
        play(schedule("1f1b", 2, 2), equal(3))

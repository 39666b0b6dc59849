"""What the ranks wrote becomes a record: slowest rank, mean loss, nothing invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwise.run.assemble import Ending, assemble, reached
from meshwise.run.job import Job
from meshwise.strategy import parse

PLAN = {
    "event": "plan",
    "num_steps": 6,
    "steps_per_epoch": 2,
    "parameters": 10,
    "unit": "tokens",
    "units_per_sample": 32,
    "metric": "perplexity",
}


def job(strategy: str = "data", num_devices: int = 2, **changes: Any) -> Job:
    chosen = parse(strategy).at(num_devices)
    assert chosen is not None
    values = {"folder": Path("runs/x"), "global_batch_size": 8, "untimed_steps": 2, **changes}
    return Job(model="gpt2-tiny", data="stdlib", strategy=chosen, preset=strategy, **values)


def step(number: int, seconds: float, loss: float | None, *, has_loss: bool = True) -> dict[str, Any]:
    return {"event": "step", "step": number, "seconds": seconds, "loss": loss, "has_loss": has_loss}


def validation(number: int, time: float, loss: float | None, **metric: float) -> dict[str, Any]:
    return {"event": "validation", "step": number, "training_time": time, "loss": loss, **metric}


def two_ranks() -> dict[int, list[dict[str, Any]]]:
    first = [PLAN, validation(0, 0.0, 5.0, perplexity=148.0)]
    second = [PLAN, validation(0, 0.0, 5.0, perplexity=148.0)]
    for number in range(1, 7):
        first.append(step(number, 9.0 if number < 3 else 0.1 * number, 4.0))
        second.append(step(number, 0.2, 2.0))
    first.append(validation(6, 10.0, 3.0, perplexity=20.0))
    second.append(validation(6, 11.0, 3.0, perplexity=20.0))
    return {0: first, 1: second}


def test_a_step_takes_as_long_as_its_slowest_rank_and_warm_up_is_left_out():
    record = assemble(job(), two_ranks(), Ending())
    assert record.step_times == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert record.step_time == pytest.approx(0.45)


def test_throughput_counts_the_tokens_of_the_global_batch():
    record = assemble(job(), two_ranks(), Ending())
    assert record.throughput == pytest.approx(8 * 32 / 0.45)
    assert record.throughput_unit == "tokens"


def test_epoch_time_is_that_of_whole_epochs_without_warm_up():
    record = assemble(job(), two_ranks(), Ending())
    assert record.epoch_time == pytest.approx((0.3 + 0.4 + 0.5 + 0.6) / 2)  # the median of epochs 2 and 3


def test_an_epoch_that_never_ran_whole_is_estimated_from_the_median_step():
    events = {0: [{**PLAN, "steps_per_epoch": 100}, *(step(number, 0.5, 1.0) for number in range(1, 7))]}
    assert assemble(job("single", 1), events, Ending()).epoch_time == pytest.approx(50.0)


def test_the_curve_has_the_mean_loss_since_the_validation_before():
    curve = assemble(job(), two_ranks(), Ending()).curve
    assert [point.step for point in curve] == [0, 6]
    assert curve[0].train_loss is None
    assert curve[1].train_loss == pytest.approx(3.0)
    assert curve[1].epoch == pytest.approx(3.0)
    assert curve[1].time == 11.0


def test_a_pipeline_reports_losses_from_its_last_stage_only():
    events = {
        0: [PLAN, step(1, 0.1, None, has_loss=False)],
        1: [PLAN, step(1, 0.2, 2.5)],
    }
    assert assemble(job("1f1b"), events, Ending()).train_losses == [2.5]


def test_a_run_cut_short_keeps_the_steps_that_all_ranks_finished():
    events = two_ranks()
    events[1] = events[1][:5]
    record = assemble(job(), events, Ending(status="failed", reason="rank 1 was killed"))
    assert (record.status, record.num_steps, record.reason) == ("failed", 3, "rank 1 was killed")
    assert record.step_times == pytest.approx([0.3])
    assert len(record.curve) == 2


def test_a_run_that_never_started_knows_nothing_and_claims_nothing():
    record = assemble(job(), {}, Ending(status="failed", reason="no"))
    assert record.step_time is None and record.throughput is None and record.epoch_time is None
    assert record.curve == [] and record.peak_memory == [] and record.communication == {}


def test_divergence_keeps_what_was_finite():
    events = {
        0: [
            PLAN,
            validation(0, 0.0, 5.0, perplexity=148.0),
            step(1, 0.1, 4.0),
            step(2, 0.1, None),
            {"event": "diverged", "step": 2},
            {"event": "end"},
        ]
    }
    record = assemble(job("single", 1), events, Ending())
    assert record.status == "diverged" and "step 2" in record.reason
    assert record.train_losses == [4.0, None]
    assert [point.validation_loss for point in record.curve] == [5.0]


def test_one_short_run_still_times_its_last_step():
    events = {0: [{**PLAN, "num_steps": 2}, step(1, 9.0, 1.0), step(2, 0.5, 1.0)]}
    assert assemble(job("single", 1, untimed_steps=3), events, Ending()).step_times == [0.5]


@pytest.mark.parametrize(
    ("target", "point", "met"),
    [
        (("perplexity", 20.0), {"perplexity": 20.0}, True),
        (("perplexity", 20.0), {"perplexity": 20.1}, False),
        (("accuracy", 0.9), {"accuracy": 0.95}, True),
        (("accuracy", 0.9), {"accuracy": 0.85}, False),
        (("accuracy", 0.9), {"perplexity": 1.0}, False),
        (("validation_loss", 1.0), {"validation_loss": 0.5}, True),
    ],
)
def test_perplexity_falls_to_its_target_and_accuracy_rises_to_it(target, point, met):
    assert reached(target, point) is met


def test_time_to_target_is_that_of_the_first_validation_that_meets_it():
    events = two_ranks()
    assert assemble(job(target=("perplexity", 25.0)), events, Ending()).time_to_target == 11.0
    assert assemble(job(target=("perplexity", 5.0)), events, Ending()).time_to_target is None


def test_communication_is_the_mean_over_ranks_and_counts_a_message_once():
    events = {
        0: [{"event": "communication", "bytes": {"send": 100, "all_reduce": 8}}],
        1: [{"event": "communication", "bytes": {"recv": 100, "all_reduce": 8}}],
    }
    assert assemble(job("1f1b"), events, Ending()).communication == {"all_reduce": 8.0, "send": 50.0}


def test_memory_needs_every_rank():
    parts = {"parameters": 1, "gradients": 1, "optimizer_state": 1, "activations": 1, "other": 1}
    memory = {"event": "memory", "memory": {"peak": 5, "phase": "backward", **parts}}
    assert assemble(job(), {0: [memory], 1: [memory]}, Ending()).peak_memory == [5, 5]
    assert assemble(job(), {0: [memory], 1: []}, Ending()).peak_memory == []


def test_pipedream_updates_after_every_micro_batch():
    chosen = job("pipedream,micro_batches=4")
    assert assemble(chosen, {}, Ending()).updates_per_step == 4
    assert assemble(job("1f1b"), {}, Ending()).updates_per_step == 1

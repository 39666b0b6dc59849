from __future__ import annotations

from typing import Any

from synthetic_survey import survey

from meshwise.record import Record
from meshwise.report.headline import headline
from meshwise.report.study import studies

MIB = 2**20


def run(preset: str, num_devices: int, **values: Any) -> Record:
    base = {"model": "m", "data": "d", "strategy": preset, "global_batch_size": 8, "status": "ok"}
    return Record.model_validate({**base, "preset": preset, "num_devices": num_devices, **values})


def sentences(*records: Record) -> list[str]:
    return headline(studies(records)[0])


def test_the_finding_in_one_sentence() -> None:
    found = sentences(
        run("single", 1, epoch_time=18.0, peak_memory=[100 * MIB]),
        run("data", 2, epoch_time=10.0, peak_memory=[100 * MIB, 90 * MIB]),
        run("zero3", 2, epoch_time=12.0, peak_memory=[59 * MIB, 58 * MIB]),
    )
    assert found == [
        "Fastest on 2 devices: data, 1.8× one device; least memory per device: zero3, 59.0 MiB, 41% below data."
    ]


def test_a_split_that_does_not_pay_is_said_to_not_pay() -> None:
    found = sentences(run("single", 1, epoch_time=5.0), run("data", 2, epoch_time=10.0))
    assert found == ["No split on 2 devices is faster than one device; the nearest, data, reaches 0.50× its speed."]


def test_differences_within_the_repeats_are_no_finding() -> None:
    found = sentences(
        *(run("data", 2, repeat=n, epoch_time=10.0 + n) for n in range(2)),
        *(run("zero1", 2, repeat=n, epoch_time=10.8 + n) for n in range(2)),
        *(run("zero3", 2, repeat=n, epoch_time=20.0 + n) for n in range(2)),
    )
    assert found == ["Fastest on 2 devices: data (zero1 within the spread of the repeats)."]


def test_nothing_that_failed_is_ever_called_fastest() -> None:
    found = sentences(
        run("data", 2, epoch_time=10.0),
        run("zero1", 2, epoch_time=1.0, status="failed", reason="killed"),
        run("tensor", 4, status="refused", reason="3 heads"),
    )
    assert found[0] == "Fastest on 2 devices: data."
    assert found[-1] == "Of 3 runs, 1 failed and 1 refused."


def test_all_failed() -> None:
    assert sentences(run("data", 2, status="failed", reason="x")) == ["No run of m ended well; the reasons are below."]


def test_stale_weights_are_named_only_where_repeats_tell_them_from_one_device() -> None:
    one = [run("single", 1, repeat=n, epoch_time=1.0, validation={"perplexity": 10.0 + n}) for n in range(2)]
    worse = [run("pipedream", 2, repeat=n, epoch_time=1.0, validation={"perplexity": 14.0 + n}) for n in range(2)]
    same = [run("pipedream", 2, repeat=n, epoch_time=1.0, validation={"perplexity": 10.9 + n}) for n in range(2)]
    text = "Learns least from the same samples: pipedream on 2 devices, perplexity 14.50 against 10.50 on one device."
    assert text in sentences(*one, *worse)
    assert not [line for line in sentences(*one, *same) if "Learns" in line]


def test_low_accuracy_is_the_bad_end() -> None:
    found = sentences(
        run("single", 1, epoch_time=1.0, validation={"accuracy": 0.9}),
        run("data", 2, epoch_time=1.0, validation={"accuracy": 0.95}),
        run("pipedream", 2, epoch_time=1.0, validation={"accuracy": 0.6}),
    )
    assert (
        "Learns least from the same samples: pipedream on 2 devices, accuracy 60.0% against 90.0% on one device."
        in found
    )


def test_long_ties_are_counted_not_listed() -> None:
    assert "zero3, gpipe and 4 others" in headline(studies(survey())[0])[0]

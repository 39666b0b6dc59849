"""Nonsense is refused in one sentence that ends in what works."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.bench.options import SurveyOptions
from meshwise.errors import InputError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": ()}, "--devices names no device count; use for example --devices 1,2"),
        ({"devices": (2, -1)}, "--devices -1 is no device count"),
        ({"repeats": 0}, "--repeats 0 is out of range; use 1 or more"),
        ({"global_batch_size": 0}, "--global-batch-size 0 is out of range"),
        ({"sequence_length": -4}, "--sequence-length -4 is out of range"),
        ({"seed": -1}, "--seed -1 is out of range; use 0 or more"),
        ({"clip_norm": float("nan")}, "--clip-norm nan is out of range"),
        ({"threads": 0}, "--threads 0 is out of range"),
        ({"watchdog": 0.0}, "--watchdog of 0.0 s is no time to wait"),
        ({"num_steps": 5, "num_epochs": 1}, "--steps 5 and --epochs 1 name two lengths; give one of them"),
        ({"num_steps": 3}, "use --steps 4 or more, or --untimed-steps 2"),
        ({"optimizer": {"learning_rate": 0.0}}, "--learning-rate 0.0 trains nothing"),
        ({"optimizer": {"momentum": 1.0}}, "--momentum 1.0 does not decay"),
        ({"optimizer": {"weight_decay": -1.0}}, "--weight-decay -1.0 is out of range"),
        ({"target": ("perplexty", 12.0)}, "is not measured; did you mean 'perplexity'"),
        ({"target": ("perplexity", float("inf"))}, "is never reached"),
        ({"target": ("accuracy", 90.0)}, "accuracy is a fraction, such as accuracy=0.9"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SurveyOptions(model="m", **given)
    assert message in str(caught.value)


def test_the_defaults_are_a_survey() -> None:
    options = SurveyOptions(model="m")
    assert options.strategies == ("all",)
    assert options.devices == (1, 2)

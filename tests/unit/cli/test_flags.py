"""Text to values."""

from __future__ import annotations

import pytest

from meshwise.bench.options import SurveyOptions
from meshwise.cli.flags import Training, device_counts, survey_fields, target
from meshwise.errors import InputError, UnitError


def test_device_counts_are_whole_numbers_between_commas() -> None:
    assert device_counts("1,2,4") == (1, 2, 4)
    assert device_counts("1, 2") == (1, 2)


@pytest.mark.parametrize("text", ["two", "1,2.5", "0", "-1", "1,,x"])
def test_what_is_no_device_count_is_named(text: str) -> None:
    with pytest.raises(InputError, match="use whole numbers such as 1,2,4"):
        device_counts(text)


def test_a_target_is_a_name_and_a_number() -> None:
    assert target("perplexity=12") == ("perplexity", 12.0)
    assert target(None) is None
    for text in ("perplexity", "perplexity=", "perplexity=low"):
        with pytest.raises(InputError, match="use for example perplexity=12"):
            target(text)


def test_the_default_flags_are_the_default_survey() -> None:
    assert SurveyOptions(model="m", **survey_fields(Training())) == SurveyOptions(model="m")


def test_the_watchdog_is_a_time_with_a_unit() -> None:
    assert survey_fields(Training(watchdog="2 min"))["watchdog"] == 120.0
    with pytest.raises(UnitError):
        survey_fields(Training(watchdog="120"))


def test_training_for_no_step_at_all_is_refused() -> None:
    for wrong in (Training(steps=0), Training(epochs=0), Training(steps=-1)):
        with pytest.raises(InputError, match="trains nothing; use 1 or more"):
            survey_fields(wrong)

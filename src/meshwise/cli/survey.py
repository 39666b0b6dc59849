"""``meshwise survey``: many strategies, many device counts, one table."""

from __future__ import annotations

from typing import Any

from meshwise.cli.flags import DEFAULT_TRAINING, StrategyList, Training, device_counts, survey_fields


def survey(
    model: str,
    /,
    *,
    strategies: StrategyList = ["all"],  # noqa: B006 (read only; a list is what the parser fills)
    devices: str = "1,2",
    training: Training = DEFAULT_TRAINING,
) -> int:
    """Train a model under many strategies and device counts, and compare them.

    Every run starts from the same weights and sees the same samples in the same order.

    Args:
        model: gpt2-tiny, gpt2-small, gpt2-medium, vgg16-tiny, vgg16, resnet50, inception_v3 or path/file.py:function.
        strategies: presets or key=value lists, such as data zero1 data=2,tensor=2; see meshwise strategies.
        devices: device counts, separated by commas.
    """
    from meshwise.bench.options import SurveyOptions

    options = SurveyOptions(
        model=model, strategies=tuple(strategies), devices=device_counts(devices), **survey_fields(training)
    )
    return run_and_show(options, json=training.json)


def run_and_show(options: Any, *, json: bool) -> int:
    """Runs the survey with a progress display on stderr, prints what was found, and returns the exit code."""
    from meshwise.bench.survey import run_survey
    from meshwise.cli import output
    from meshwise.cli.progress import display

    found = run_survey(options, observer=display())
    if json:
        output.print_json(output.survey_content(found))
    else:
        output.print_survey(found)
    if found.interrupted:
        raise KeyboardInterrupt
    return 1 if found.failed else 0

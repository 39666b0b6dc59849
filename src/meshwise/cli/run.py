"""``meshwise run``: one strategy on one device count, by the same machinery as a survey."""

from __future__ import annotations

from meshwise.cli.flags import DEFAULT_TRAINING, Training, survey_fields


def run(
    model: str, /, *, strategy: str = "single", devices: int | None = None, training: Training = DEFAULT_TRAINING
) -> int:
    """Train a model under one strategy, measured as in a survey.

    Args:
        model: gpt2-tiny, gpt2-small, gpt2-medium, vgg16-tiny, vgg16, resnet50, inception_v3 or path/file.py:function.
        strategy: a preset or a key=value list, such as zero3 or data=2,tensor=2; see meshwise strategies.
        devices: device count; default: what the strategy's sizes come to, else 2.
    """
    from meshwise.bench.options import SurveyOptions
    from meshwise.cli.survey import run_and_show
    from meshwise.strategy import parse

    request = parse(strategy)
    count = devices if devices is not None else request.required_devices or 2
    options = SurveyOptions(model=model, strategies=(strategy,), devices=(count,), **survey_fields(training))
    return run_and_show(options, json=training.json)

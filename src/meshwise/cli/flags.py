"""The flags ``survey`` and ``run`` share, and the reading of their text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from meshwise.errors import InputError
from meshwise.units import parse


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Training:
    """How each run trains."""

    data: str | None = None
    """stdlib, digits, fashion-mnist, text:PATH, imagefolder:PATH or a Hugging Face name; default: the model's own."""
    steps: int | None = None
    """Optimizer steps to train, instead of --epochs."""
    epochs: int | None = None
    """Passes over the training set; 1 unless --steps is given."""
    repeats: int = 1
    """Trainings of each strategy and device count; repeat r uses seed + r."""
    seed: int = 0
    """Fixes initial weights, sample order and the train/validation split."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the same global batch everywhere; weak: it grows with the data-parallel size."""
    global_batch_size: int | None = None
    """Samples of one step, over all devices; default: the model's own."""
    sequence_length: int | None = None
    """Tokens of one sample, for language models."""
    image_size: int | None = None
    """Pixels of one side, for image models."""
    num_classes: int | None = None
    """Classes or vocabulary size of the model; default: the model's own."""
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    """Default: the model's own."""
    learning_rate: float | None = None
    """Reached after --warm-up-steps; default: the model's own."""
    momentum: float | None = None
    """Of sgd, from 0 up to 1."""
    weight_decay: float | None = None
    """Of the optimizer."""
    warm_up_steps: int | None = None
    """Steps over which the learning rate grows from 0."""
    clip_norm: float = 0.0
    """Largest global gradient norm; 0 does not clip."""
    target_metric: str | None = None
    """When to call it reached, such as perplexity=12, validation_loss=2.5 or accuracy=0.9."""
    stop_at_target: bool = False
    """End each run where it reaches --target-metric."""
    evaluate_every: int = 0
    """Steps between validations; 0 validates once an epoch. One is always made at the start and at the end."""
    train_samples: int | None = None
    """Use only this many training samples."""
    validation_samples: int | None = 512
    """Use only this many validation samples."""
    untimed_steps: int = 3
    """First steps left out of every time."""
    watchdog: str = "120 s"
    """A rank that makes no progress for this long counts as hung."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA devices where there is one for every rank, else processes on the CPU."""
    threads: int = 1
    """CPU threads of each process."""
    deterministic: bool = False
    """Use deterministic kernels."""
    tensorboard: bool = False
    """Write TensorBoard logs as well."""
    no_trace: bool = False
    """Do not record a timeline of one step of every run."""
    out: Path | None = None
    """Folder to make; default: runs/MODEL-TIME."""
    replace: bool = False
    """Remove the earlier survey in --out."""
    json: bool = False
    """Print one JSON object on stdout and nothing else."""


DEFAULT_TRAINING = Training()


def survey_fields(training: Training) -> dict[str, Any]:
    """``training`` as the keyword arguments of ``SurveyOptions``.

    Raises:
        InputError: a length of time without a unit, or a target metric that is not ``name=value``.
    """
    return {
        "data": training.data,
        "scaling": training.scaling,
        "num_steps": _given(training.steps, "steps"),
        "num_epochs": _given(training.epochs, "epochs"),
        "repeats": training.repeats,
        "seed": training.seed,
        "global_batch_size": training.global_batch_size,
        "sequence_length": training.sequence_length,
        "image_size": training.image_size,
        "num_classes": training.num_classes,
        "optimizer": {
            "name": training.optimizer,
            "learning_rate": training.learning_rate,
            "momentum": training.momentum,
            "weight_decay": training.weight_decay,
            "warm_up_steps": training.warm_up_steps,
        },
        "clip_norm": training.clip_norm,
        "target": target(training.target_metric),
        "stop_at_target": training.stop_at_target,
        "evaluate_every": training.evaluate_every,
        "train_samples": training.train_samples,
        "validation_samples": training.validation_samples,
        "untimed_steps": training.untimed_steps,
        "watchdog": parse(training.watchdog, "s"),
        "device": training.device,
        "threads": training.threads,
        "deterministic": training.deterministic,
        "tensorboard": training.tensorboard,
        "trace": not training.no_trace,
        "out": training.out,
        "replace": training.replace,
    }


def device_counts(text: str) -> tuple[int, ...]:
    """Reads ``1,2,4``.

    Raises:
        InputError: something between the commas is no whole number from 1.
    """
    counts = []
    for part in filter(None, text.replace(" ", ",").split(",")):
        if not part.isdecimal() or int(part) < 1:
            raise InputError(
                f"--devices {text} has {part!r}, which is no device count; use whole numbers such as 1,2,4"
            )
        counts.append(int(part))
    return tuple(counts)


def target(text: str | None) -> tuple[str, float] | None:
    """Reads ``perplexity=12``.

    Raises:
        InputError: no ``=``, or no number after it.
    """
    if text is None:
        return None
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise InputError(f"--target-metric {text!r} is not name=number; use for example perplexity=12") from None


def _given(value: int | None, flag: str) -> int:
    """0 where the flag was not given; a given 0 is refused, since it would train nothing."""
    if value is None:
        return 0
    if value < 1:
        raise InputError(f"--{flag} {value} trains nothing; use 1 or more")
    return value


StrategyList = Annotated[list[str], Parameter(consume_multiple=True)]

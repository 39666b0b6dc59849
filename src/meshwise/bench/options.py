"""What a survey is asked for, as one checked value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwise.errors import InputError, did_you_mean

TARGET_METRICS = ("perplexity", "validation_loss", "accuracy")

_AT_LEAST_ONE = (
    "repeats",
    "global_batch_size",
    "sequence_length",
    "image_size",
    "num_classes",
    "train_samples",
    "validation_samples",
)
_NOT_NEGATIVE = ("num_steps", "num_epochs", "seed", "clip_norm", "evaluate_every", "untimed_steps")


class OptimizerOptions(BaseModel):
    """What was said about the optimizer; None leaves it to the model's own recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["sgd", "adam", "adamw"] | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    warm_up_steps: int | None = None


class SurveyOptions(BaseModel):
    """One survey: a model, the strategies and device counts to train it under, and how long.

    Attributes:
        model: zoo name or ``path/file.py:function``.
        data: data text; None for the data the model is usually trained on.
        strategies: strategy texts as written; ``all`` stands for every preset.
        devices: device counts, each strategy is trained on every one it can use.
        scaling: ``strong`` keeps the global batch everywhere, ``weak`` multiplies it by the data-parallel size.
        num_steps: optimizer steps; 0 means ``num_epochs`` passes over the training set.
        repeats: trainings per strategy and device count; repeat ``r`` uses ``seed + r``.
        global_batch_size: samples per step; None for the model's default.
        target: (metric, value) that ends ``time_to_target``.
        out: folder to make; None for ``runs/MODEL-TIME``.
        replace: an earlier survey in ``out`` may be removed.

    Raises:
        InputError: a size that is no size, both steps and epochs, an unknown target metric.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    data: str | None = None
    strategies: tuple[str, ...] = ("all",)
    devices: tuple[int, ...] = (1, 2)
    scaling: Literal["strong", "weak"] = "strong"
    num_steps: int = 0
    num_epochs: int = 0
    repeats: int = 1
    seed: int = 0
    global_batch_size: int | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    num_classes: int | None = None
    optimizer: OptimizerOptions = Field(default_factory=OptimizerOptions)
    clip_norm: float = 0.0
    target: tuple[str, float] | None = None
    stop_at_target: bool = False
    evaluate_every: int = 0
    train_samples: int | None = None
    validation_samples: int | None = 512
    untimed_steps: int = 3
    watchdog: float = 120.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    deterministic: bool = False
    tensorboard: bool = False
    trace: bool = True
    out: Path | None = None
    replace: bool = False

    @model_validator(mode="after")
    def _check(self) -> SurveyOptions:
        if not self.strategies:
            raise InputError("--strategies names no strategy; use for example --strategies data zero1, or all")
        _check_devices(self.devices)
        for name in _AT_LEAST_ONE:
            _check_number(name, getattr(self, name), lowest=1)
        for name in _NOT_NEGATIVE:
            _check_number(name, getattr(self, name), lowest=0)
        _check_number("threads", self.threads, lowest=1)
        if not (self.watchdog > 0 and math.isfinite(self.watchdog)):
            raise InputError(f"--watchdog of {self.watchdog} s is no time to wait; use for example '120 s'")
        _check_length(self)
        _check_optimizer(self.optimizer)
        _check_target(self.target)
        if self.stop_at_target and self.target is None:
            raise InputError("--stop-at-target has no target; add for example --target-metric perplexity=12")
        return self


def _check_devices(devices: tuple[int, ...]) -> None:
    if not devices:
        raise InputError("--devices names no device count; use for example --devices 1,2")
    for count in devices:
        if count < 1:
            raise InputError(f"--devices {count} is no device count; use whole numbers from 1, such as 1,2")


def _check_number(name: str, value: float | None, *, lowest: int) -> None:
    if value is None or (math.isfinite(value) and value >= lowest):
        return
    flag = {"num_steps": "steps", "num_epochs": "epochs"}.get(name, name.replace("_", "-"))
    raise InputError(f"--{flag} {value} is out of range; use {lowest} or more")


def _check_length(options: SurveyOptions) -> None:
    steps, untimed = options.num_steps, options.untimed_steps
    if steps and options.num_epochs:
        raise InputError(f"--steps {steps} and --epochs {options.num_epochs} name two lengths; give one of them")
    if steps and steps <= untimed:
        raise InputError(
            f"--steps {steps} leaves no step to time after {untimed} untimed ones; use --steps {untimed + 1} or more, "
            f"or --untimed-steps {steps - 1}"
        )


def _check_optimizer(optimizer: OptimizerOptions) -> None:
    rate = optimizer.learning_rate
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InputError(f"--learning-rate {rate} trains nothing; use a number above 0, such as 0.001")
    momentum = optimizer.momentum
    if momentum is not None and not 0 <= momentum < 1:
        raise InputError(f"--momentum {momentum} does not decay; use a number from 0 up to, not including, 1")
    _check_number("weight_decay", optimizer.weight_decay, lowest=0)
    _check_number("warm_up_steps", optimizer.warm_up_steps, lowest=0)


def _check_target(target: tuple[str, float] | None) -> None:
    if target is None:
        return
    metric, value = target
    if metric not in TARGET_METRICS:
        raise InputError(f"--target-metric {metric} is not measured; {did_you_mean(metric, TARGET_METRICS)}")
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"--target-metric {metric}={value} is never reached; use a number above 0")
    if metric == "accuracy" and value > 1:
        raise InputError(f"--target-metric accuracy={value} is above 1; accuracy is a fraction, such as accuracy=0.9")


def described(options: SurveyOptions) -> dict[str, Any]:
    """The options as JSON values, for ``survey.json``."""
    return options.model_dump(mode="json")

"""A job: everything one training needs, as a value. The survey writes it, the worker reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshwise.strategy import Strategy


class OptimizerSettings(BaseModel):
    """``name`` is ``sgd``, ``adam`` or ``adamw``; ``learning_rate`` is reached after ``warm_up_steps`` linear steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    warm_up_steps: int = 0


class Job(BaseModel):
    """One training of one model under one strategy.

    Attributes:
        model: zoo name or ``path/file.py:function``.
        data: data text, as ``stdlib`` or ``text:PATH``.
        strategy: the resolved strategy; ``preset`` the text it was asked by.
        num_classes: classes or vocabulary size of the model, where not the model's own default.
        num_steps: optimizer steps of the reference batch (an asynchronous pipeline may update several times in one);
            0 means ``num_epochs`` whole epochs.
        untimed_steps: first steps left out of every time; at least one step is always timed.
        evaluate_every: steps between validations; 0 means once per epoch. One is always made at the start and end.
        clip_norm: largest global gradient norm; 0 does not clip.
        target: (metric, value) whose first reaching is ``time_to_target``, e.g. ("perplexity", 12.0).
        stop_at_target: whether training ends there; else it goes on to the steps asked for.
        folder: where this run's files go.
        split_seed: of the division into training and validation samples; ``seed`` is of weights and order.
        watchdog: seconds without progress after which a rank counts as hung.
        device: ``auto`` takes CUDA devices where there is one for every rank, else processes on the CPU.
        deterministic: deterministic kernels.
        trace: whether to write a timeline of one step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str
    data: str
    strategy: Strategy
    preset: str
    folder: Path
    global_batch_size: int
    sequence_length: int | None = None
    image_size: int | None = None
    num_classes: int | None = None
    num_steps: int = 0
    num_epochs: int = 1
    untimed_steps: int = 3
    evaluate_every: int = 0
    train_samples: int | None = None
    validation_samples: int | None = 512
    optimizer: OptimizerSettings = OptimizerSettings()
    clip_norm: float = 0.0
    seed: int = 0
    split_seed: int = 0
    repeat: int = 0
    scaling: str = "strong"
    target: tuple[str, float] | None = None
    stop_at_target: bool = False
    watchdog: float = 120.0
    threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    trace: bool = True
    tensorboard: bool = False

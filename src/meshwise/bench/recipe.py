"""What the model brings to a survey: its defaults where the user said nothing, and the facts the checks need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.bench.cells import Cell, Cells
from meshwise.bench.options import OptimizerOptions, SurveyOptions
from meshwise.errors import InputError
from meshwise.run.job import Job, OptimizerSettings
from meshwise.strategy.legal import ModelFacts
from meshwise.zoo import OptimizerDefaults, Task, get_task
from meshwise.zoo.data import load, num_steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, batch and optimizer as they will be used, and what is known of the model."""

    data: str
    global_batch_size: int
    optimizer: OptimizerSettings
    facts: ModelFacts
    num_train_samples: int
    notes: tuple[str, ...] = ()

    def check_batches(self, cells: Cells) -> None:
        """Passes where the data fill at least one global batch of every cell that will run.

        Raises:
            DataError: they do not.
        """
        for cell in cells.cells:
            if not cell.refused:
                num_steps_per_epoch(self.num_train_samples, cell.global_batch_size)

    def job(self, options: SurveyOptions, cell: Cell, *, repeat: int, folder: Path) -> Job:
        """The job of one repeat of ``cell``, whose files go to ``folder``."""
        return Job(
            model=options.model,
            data=self.data,
            strategy=cell.strategy,
            preset=cell.preset,
            folder=folder,
            global_batch_size=cell.global_batch_size,
            sequence_length=options.sequence_length,
            image_size=options.image_size,
            num_classes=options.num_classes,
            num_steps=options.num_steps,
            num_epochs=options.num_epochs or 1,
            untimed_steps=options.untimed_steps,
            evaluate_every=options.evaluate_every,
            train_samples=options.train_samples,
            validation_samples=options.validation_samples,
            optimizer=self.optimizer,
            clip_norm=options.clip_norm,
            seed=options.seed + repeat,
            split_seed=options.seed,
            repeat=repeat,
            scaling=options.scaling,
            target=options.target,
            stop_at_target=options.stop_at_target,
            watchdog=options.watchdog,
            threads=options.threads,
            device=options.device,
            deterministic=options.deterministic,
            trace=options.trace,
            tensorboard=options.tensorboard,
        )


def look_up(options: SurveyOptions) -> Recipe:
    """Finds the model and its data, and looks at the model on the meta device, without its weights.

    Raises:
        ModelError: no such model, or sizes it cannot have.
        DataError: no such data, or data that does not suit the model.
        InputError: a target metric the model has not.
    """
    from meshwise.run.chain import facts

    task = get_task(
        options.model,
        sequence_length=options.sequence_length,
        image_size=options.image_size,
        num_classes=options.num_classes,
    )
    _check_target(options, task)
    data = load(
        options.data or task.default_data,
        task=task,
        seed=options.seed,
        train_samples=options.train_samples,
        validation_samples=options.validation_samples,
    )
    with torch.device("meta"):
        module = task.build()
    return Recipe(
        data=data.name,
        global_batch_size=options.global_batch_size or task.default_global_batch_size,
        optimizer=merged(options.optimizer, task.optimizer),
        facts=facts(module, options.model, sequence_length=task.sequence_length),
        num_train_samples=len(data.train),
        notes=_notes(options.optimizer, task.optimizer),
    )


def merged(given: OptimizerOptions, default: OptimizerDefaults) -> OptimizerSettings:
    """What was given, and the model's own recipe for the rest."""
    said = {name: value for name, value in given.model_dump().items() if value is not None}
    own = {name: getattr(default, name) for name in OptimizerSettings.model_fields}
    return OptimizerSettings(**{**own, **said})


def _check_target(options: SurveyOptions, task: Task) -> None:
    known = (task.metric, "validation_loss")
    if options.target is not None and options.target[0] not in known:
        raise InputError(
            f"--target-metric {options.target[0]} is not a metric of {options.model}; use {' or '.join(known)}"
        )


def _notes(given: OptimizerOptions, default: OptimizerDefaults) -> tuple[str, ...]:
    """A learning rate found for one kind of optimizer says little about another."""
    other_kind = given.name is not None and (given.name == "sgd") != (default.name == "sgd")
    if other_kind and given.learning_rate is None:
        return (
            f"the learning rate {default.learning_rate:g} was chosen for {default.name}, not {given.name}; "
            "set --learning-rate",
        )
    return ()

"""The one training loop: every strategy, every model, every kind of data.

build ─► validate ─► step … step ─► validate ─► step … step ─► validate ─► one step looked at closely
                     └──── timed ────┘          └──── timed ────┘           (memory, bytes, timeline)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwise.errors import DataError
from meshwise.measure.clock import Stopwatch
from meshwise.measure.communication import CommunicationCounter
from meshwise.measure.profile import allocated, memory_of, profiled
from meshwise.measure.trace import compact
from meshwise.run.agreement import Agreement
from meshwise.run.assemble import reached
from meshwise.run.executor import Evaluation, Executor
from meshwise.run.job import Job, OptimizerSettings
from meshwise.run.rank_files import RankWriter, rank_trace_path
from meshwise.zoo import Task, data, get_task

Parallelize = Callable[..., Executor]


def train(job: Job, *, device: torch.device, writer: RankWriter, parallelize: Parallelize | None = None) -> None:
    """Trains as ``job`` says on this rank; what is measured goes to ``writer`` as it is known.

    Args:
        job: what to train, and how.
        device: where this rank computes. More than one rank needs an initialised process group.
        writer: takes events and heartbeats.
        parallelize: makes the executor; None for ``meshwise.run.apply.parallelize``.

    Raises:
        MeshwiseError: the model, the data or the strategy cannot be had as asked.
    """
    training = _set_up(job, device, writer=writer, parallelize=parallelize or _apply())
    training.run()
    training.look_closely()


class Optimizers:
    """An ``OptimizerFactory`` that remembers what it made, so that the learning rate can follow the steps."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self._made: list[torch.optim.Optimizer] = []

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        settings = self.settings
        optimizer: torch.optim.Optimizer
        common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        if settings.name == "sgd":
            optimizer = torch.optim.SGD(parameters, momentum=settings.momentum, **common)
        else:
            kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
            # A third of the time on CPU too. SGD has no fused form for FSDP2's parameters (torch 2.14).
            optimizer = kind(parameters, fused=True, **common)
        self._made.append(optimizer)
        return optimizer

    def warm_up(self, step: int) -> None:
        """Sets the learning rate of ``step`` (from 0): linear up to ``warm_up_steps``, then constant."""
        share = min(1.0, (step + 1) / max(1, self.settings.warm_up_steps))
        for optimizer in self._made:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * share


def validation_slices(num_samples: int, *, batch_size: int, replicas: int, replica: int) -> list[range]:
    """Samples of each validation batch that fall to ``replica``; every replica has as many batches, none empty.

    The batches are the same for all strategies; a replica takes its contiguous part. A last batch with fewer samples
    than replicas joins the one before.

    Raises:
        DataError: fewer samples than replicas.
    """
    if num_samples < replicas:
        raise DataError(
            f"{num_samples} validation sample(s) do not give each of {replicas} data replicas one; "
            f"use at least {replicas}"
        )
    size = max(batch_size, replicas)
    starts = list(range(0, num_samples, size))
    if num_samples - starts[-1] < replicas:
        starts.pop()
    slices = []
    for start, end in zip(starts, [*starts[1:], num_samples]):
        count = end - start
        slices.append(range(start + count * replica // replicas, start + count * (replica + 1) // replicas))
    return slices


def _apply() -> Parallelize:
    from meshwise.run.apply import parallelize

    return parallelize


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How long and how often."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: int


def _set_up(job: Job, device: torch.device, *, writer: RankWriter, parallelize: Parallelize) -> _Training:
    writer.beat(0, "model")
    task = get_task(
        job.model, sequence_length=job.sequence_length, image_size=job.image_size, num_classes=job.num_classes
    )
    torch.manual_seed(job.seed)
    module = task.build()
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    writer.beat(0, "data")
    samples = data.load(
        job.data,
        task=task,
        seed=job.split_seed,
        train_samples=job.train_samples,
        validation_samples=job.validation_samples,
    )
    steps_per_epoch = data.num_steps_per_epoch(len(samples.train), job.global_batch_size)
    plan = _Plan(
        num_steps=job.num_steps or job.num_epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=job.evaluate_every or steps_per_epoch,
    )
    writer.event(
        "plan",
        **asdict(plan),
        parameters=num_parameters,
        unit=task.sample_unit,
        units_per_sample=task.sequence_length or 1,
        metric=task.metric,
        train_samples=len(samples.train),
        validation_samples=len(samples.validation),
    )
    writer.beat(0, "parallelize")
    optimizers = Optimizers(job.optimizer)
    executor = parallelize(
        module,
        job.strategy,
        loss=task.loss,
        optimizer=optimizers,
        clip_norm=job.clip_norm,
        device=device,
        example=samples.train.batch(np.arange(1))[0],
        global_batch_size=job.global_batch_size,
        seed=job.seed,
    )
    return _Training(
        job=job, device=device, writer=writer, task=task, samples=samples, plan=plan, executor=executor, rate=optimizers
    )


@dataclass(kw_only=True)
class _Training:
    """One rank of one training under way."""

    job: Job
    device: torch.device
    writer: RankWriter
    task: Task
    samples: data.Data
    plan: _Plan
    executor: Executor
    rate: Optimizers

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.device)
        # Long enough for the launcher's watchdog to speak first, and to name the rank to blame.
        self.agreement = Agreement(timedelta(seconds=3 * self.job.watchdog + 60))

    def run(self) -> None:
        """Steps and validations; ends early when a loss is not finite or, if asked, when the target is reached."""
        if self._validate(0) is None:
            return
        every = self.plan.evaluate_every
        for step in range(1, self.plan.num_steps + 1):
            if self._diverged(self._step(step)):
                return
            if step % every and step < self.plan.num_steps:
                continue
            self._flush(step)
            if self._diverged(self.agreement.settle()):
                return
            point = self._validate(step)
            if point is None or (self.job.stop_at_target and self.job.target and reached(self.job.target, point)):
                return

    def look_closely(self) -> None:
        """Memory, bytes communicated and, if asked, the timeline of further steps, of which nothing else is kept.

        An asynchronous pipeline is looked at from empty to drained, over as many steps as fill it.
        """
        strategy, step = self.job.strategy, self.writer.step
        num_steps = 1
        if strategy.asynchronous:
            num_steps += math.ceil((strategy.num_stages - 1) / strategy.num_micro_batches)

        def steps() -> None:
            for index in range(num_steps):
                self.writer.beat(step, self.writer.phase)
                self.executor.step(*self._batch(step + index))
            self.executor.flush()

        self.writer.beat(step, "communication")
        with CommunicationCounter() as counter:
            steps()
        counts = sorted(counter.counts.items())
        self.writer.event(
            "communication",
            bytes={kind: count.bytes / num_steps for kind, count in counts},
            calls={kind: count.calls / num_steps for kind, count in counts},
        )
        self.writer.beat(step, "memory")
        held = self.executor.held()
        self.executor.release_gradients()
        before = allocated(self.device)
        trace = profiled(steps, device=self.device)
        self.writer.beat(step, "trace")
        memory = memory_of(trace, device=self.device, held=held, before=before)
        self.writer.event("memory", memory=memory.model_dump())
        if self.job.trace:
            path = rank_trace_path(self.job.folder, self.writer.rank)
            path.write_text(json.dumps(compact(trace), separators=(",", ":")), encoding="utf-8")

    def _step(self, step: int) -> int | None:
        """Trains one global batch; the step at which, as is now known, some rank's loss was not finite."""
        self.writer.beat(step, "step")
        self.rate.warm_up(step - 1)
        with self.watch:
            result = self.executor.step(*self._batch(step - 1))
        loss = None if result.loss is None else float(result.loss)
        finite = loss is None or math.isfinite(loss)
        self.writer.event("step", step=step, seconds=self.watch.last, loss=loss, has_loss=loss is not None)
        return self.agreement.report(step, finite=finite)

    def _flush(self, step: int) -> None:
        """Finishes what is in flight; its time is training time."""
        self.writer.beat(step, "flush")
        with self.watch:
            self.executor.flush()

    def _diverged(self, step: int | None) -> bool:
        if step is not None:
            self.executor.flush()
            self.writer.event("diverged", step=step)
        return step is not None

    def _batch(self, index: int) -> tuple[Tensor, Tensor]:
        """This replica's contiguous part of global batch ``index`` (from 0)."""
        indices, _ = data.step_indices(
            len(self.samples.train), self.job.global_batch_size, seed=self.job.seed, step=index
        )
        size = self.job.strategy.local_batch_size(self.job.global_batch_size)
        start = self.executor.groups.index("data") * size
        return self._on_device(self.samples.train.batch(indices[start : start + size]))

    def _validate(self, step: int) -> dict[str, float] | None:
        """Writes and gives loss and metric over the whole validation set; None, and "diverged", if not finite."""
        total = Evaluation()
        for part in validation_slices(
            len(self.samples.validation),
            batch_size=self.job.global_batch_size,
            replicas=self.executor.groups.size("data"),
            replica=self.executor.groups.index("data"),
        ):
            self.writer.beat(step, "validation")
            found = self.executor.evaluate(
                *self._on_device(self.samples.validation.batch(np.arange(part.start, part.stop)))
            )
            if (
                found is not None and self.executor.groups.index("tensor") == 0
            ):  # a tensor group finds the same, together
                total += found
        loss_sum, num_targets, num_correct = self.agreement.sums(
            [total.loss_sum, float(total.num_targets), float(total.num_correct)]
        )
        loss = loss_sum / num_targets
        point = {"training_time": self.watch.total}
        if self.task.metric == "accuracy":
            point["accuracy"] = num_correct / num_targets
        else:
            point["perplexity"] = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
        if not math.isfinite(loss):
            self.writer.event("diverged", step=step)
            return None
        self.writer.event(
            "validation", step=step, loss=loss, **{k: v for k, v in point.items() if k != "validation_loss"}
        )
        return point

    def _on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)


_LARGEST_EXPONENT = 700.0
"""e to a larger power overflows a float."""

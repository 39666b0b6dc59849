"""Inter-layer parallelism with a flush: GPipe, 1F1B and interleaved 1F1B, executed by ``torch.distributed.pipelining``.

Which schedule does what is drawn in ``strategy/schedule.py``; the tests hold torch's order of actions to ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.profiler import record_function

from meshwise.run.chain import Chain
from meshwise.run.executor import Evaluation, StepResult
from meshwise.run.point_to_point import StageLink
from meshwise.run.synchronous import Built, Synchronous, evaluation_mode, scaled

SCHEDULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gpipe": lambda stages, count, loss: ScheduleGPipe(stages[0], count, loss_fn=loss, scale_grads=False),
        "1f1b": lambda stages, count, loss: Schedule1F1B(stages[0], count, loss_fn=loss, scale_grads=False),
        "interleaved": lambda stages, count, loss: ScheduleInterleaved1F1B(
            stages, count, loss_fn=loss, scale_grads=False
        ),
    }
)
"""Gradients are scaled by the loss, not by the schedule: a weight two stages share would be scaled twice."""


class Part(nn.Module):
    """Consecutive layers of a chain as one module."""

    def __init__(self, links: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer for _, layer in links])
        self.link_names = [name for name, _ in links]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def chain(self) -> Chain:
        return list(zip(self.link_names, self.layers))


class Pipeline(Synchronous):
    """Virtual stage ``k`` of this device is stage ``device + k · size`` of the pipeline."""

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        size, index = self.groups.size("pipeline"), self.groups.index("pipeline")
        self.indices = [index + k * size for k in range(len(built.parts))]
        self.is_first, self.is_last = index == 0, index == size - 1
        self.link = StageLink(self.groups)
        self.shape: torch.Size | None = None
        self.schedule: Any = None

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        count = self.strategy.num_micro_batches
        if inputs.shape != self.shape:
            # Message shapes are frozen with the first batch a schedule sees; another shape needs another schedule.
            self.shape, self.schedule = inputs.shape, self._build_schedule()
        self.replication.begin(count)
        losses: list[Tensor] = []
        arguments = (inputs.contiguous(),) if self.is_first else ()
        ending = {"target": targets, "losses": losses} if self.is_last else {}
        with record_function("meshwise.pipeline"):
            self.schedule.step(*arguments, **ending, return_outputs=False)
        norm = self.finish_step()
        loss = torch.stack([loss.detach() for loss in losses]).sum() if self.is_last else None
        return StepResult(loss=loss, gradient_norm=norm)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Evaluation | None:
        self.prepare_evaluation()
        outputs: Any = None
        with evaluation_mode(self.built.parts):
            for number, part in zip(self.indices, self.built.parts):
                x = inputs if number == 0 else self._receive(number)
                outputs = part(x)
                if number < self.strategy.num_stages - 1:
                    self._send(outputs, number)
        return self.evaluation(outputs, targets) if self.is_last else None

    def _receive(self, number: int) -> Tensor:
        return self.link.receive_any((number - 1) % self.groups.size("pipeline"))

    def _send(self, outputs: Tensor, number: int) -> None:
        self.link.send_any(outputs, (number + 1) % self.groups.size("pipeline"))

    def _build_schedule(self) -> Any:
        stages = [
            PipelineStage(
                module, number, self.strategy.num_stages, self.groups.device, group=self.groups.group("pipeline")
            )
            for number, module in zip(self.indices, self.replication.modules)
        ]
        loss = scaled(self.built.loss, self.strategy.num_micro_batches)
        return SCHEDULES[self.strategy.schedule](stages, self.strategy.num_micro_batches, loss)


def original_names(module: nn.Module, part: nn.Module) -> dict[str, str]:
    """Names of the part's parameters and buffers → names in the original module (of tied names, the nearest)."""
    if part is module:
        return {name: name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    aliases: dict[int, list[str]] = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        aliases.setdefault(id(tensor), []).append(name)
    names = {}
    links = part.link_names if isinstance(part, Part) else []
    for key, tensor in [*part.named_parameters(), *part.named_buffers()]:
        if id(tensor) not in aliases:
            continue
        _, index, *rest = key.split(".")
        direct = ".".join([links[int(index)], *rest]) if links else key
        known = aliases[id(tensor)]
        names[key] = direct if direct in known else known[0]
    return names

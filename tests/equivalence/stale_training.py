"""What the PipeDream papers say is computed, in one process: a plain loop over the formulas, all versions kept.

    pipedream         w_s(t+1) = w_s(t) - ν ∇f(w_0(t-n+1), …, w_{n-1}(t))      [Narayanan 2019, section 3.3]
    pipedream-vsync   w_s(t+1) = w_s(t) - ν ∇f(w_0(t-n+1), …, w_{n-1}(t-n+1))
    pipedream-2bw     W(t+1)   = W(t)   - ν ∇f(W(t-1))                          [Narayanan 2021, section 3.1]

Versions before the first are the first. In the model ``tied`` the last stage's output layer is the first stage's
embedding: it is computed with the first stage's version, and its gradient is added to the embedding's. Nothing here
knows of processes, messages, or of when a copy can be saved. Also the models and batches on which an executor is held
against it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

VOCABULARY, SEQUENCE, WIDTH = 11, 5, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training to hold against the formulas; ``flush_after`` is the step after which the pipeline drains once."""

    model: str
    num_stages: int
    schedule: str
    num_micro_batches: int
    optimizer: str
    checkpointing: str = "none"
    num_replicas: int = 1
    num_steps: int = 12
    flush_after: int = 7
    micro_batch_size: int = 2

    def __str__(self) -> str:
        return (
            f"{self.model}-{self.schedule}-m{self.num_micro_batches}-{self.optimizer}-{self.checkpointing}"
            f"-{self.num_replicas}x{self.num_stages}"
        )

    def learning_rate(self, step: int) -> float:
        return 0.05 / (1 + 0.2 * step)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(SEQUENCE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position[: x.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def quarters(model: str) -> list[nn.Module]:
    """Four parts of a small model, in order. Some begin with a module that works in place, as VGG's would."""
    if model == "mlp":
        return [
            nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
            nn.Sequential(nn.Linear(16, 16)),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh()),
            nn.Sequential(nn.Linear(16, 5)),
        ]
    if model == "cnn":
        return [
            nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)),
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)),
            nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
        ]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return [Embedding(), Block(), Block(), nn.Sequential(nn.LayerNorm(WIDTH), head)]


def build_stages(case: Case) -> list[nn.Module]:
    torch.manual_seed(3)
    parts = [part.double() for part in quarters(case.model)]
    size = len(parts) // case.num_stages
    stages: list[nn.Module] = [
        nn.Sequential(*parts[index * size : (index + 1) * size]) for index in range(case.num_stages)
    ]
    for (home, name), (other, other_name) in ties(case):
        stages[other].get_parameter(other_name).data = stages[home].get_parameter(name).detach().clone()
    return stages


def ties(case: Case) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Stage and name of a weight, and of its second use."""
    if case.model != "tied":
        return []
    last = case.num_stages - 1
    return [((0, "0.token.weight"), (last, f"{4 // case.num_stages - 1}.1.weight"))]


def build_batches(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """``[step][replica]``: that replica's inputs and targets."""
    generator = torch.Generator().manual_seed(17)
    local = case.micro_batch_size * case.num_micro_batches
    return [[make_batch(case.model, local, generator) for _ in range(case.num_replicas)] for _ in range(case.num_steps)]


def make_batch(model: str, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if model in ("gpt", "tied"):
        tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 6) if model == "mlp" else (size, 2, 6, 6)
    inputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(5, (size,), generator=generator)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def build_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=case.learning_rate(0))
    return torch.optim.SGD(parameters, lr=case.learning_rate(0), momentum=0.9, weight_decay=0.01)


def version_used(case: Case, stage: int, micro_batch: int) -> int:
    if case.schedule == "pipedream":
        return max(0, micro_batch - (case.num_stages - 1 - stage))
    if case.schedule == "pipedream-vsync":
        return max(0, micro_batch - (case.num_stages - 1))
    return max(0, micro_batch // case.num_micro_batches - 1)


def simulate(case: Case) -> tuple[list[float], list[dict[str, Tensor]], list[nn.Module]]:
    """Loss of every step, final state of every stage (replica 0's buffers), and the stages with that state."""
    masters = build_stages(case)
    replicas = [copy.deepcopy(masters) for _ in range(case.num_replicas)]
    optimizers = [build_optimizer(case, list(master.parameters())) for master in masters]
    versions = [[_snapshot(master)] for master in masters]
    per_update = case.num_micro_batches if case.schedule == "pipedream-2bw" else 1
    batches = build_batches(case)
    losses: list[float] = []
    for first, end in ((0, case.flush_after), (case.flush_after, case.num_steps)):
        base = len(versions[0]) - 1
        stream = [
            [
                (inputs.chunk(case.num_micro_batches)[index], targets.chunk(case.num_micro_batches)[index])
                for inputs, targets in batches[step]
            ]
            for step in range(first, end)
            for index in range(case.num_micro_batches)
        ]
        values: list[Tensor] = []
        totals: list[list[list[Tensor]]] = []
        for number, per_replica in enumerate(stream):
            used = [versions[s][base + version_used(case, s, number)] for s in range(case.num_stages)]
            for (home, name), (other, other_name) in ties(case):
                used[other] = used[other] | {other_name: used[home][name]}
            outcomes = [_gradients(stages, used, *data) for stages, data in zip(replicas, per_replica)]
            values.append(outcomes[0][0])
            for (home, name), (other, other_name) in ties(case):
                i, j = list(used[home]).index(name), list(used[other]).index(other_name)
                for _, gradients in outcomes:
                    gradients[home][i] = gradients[home][i] + gradients[other][j]
            totals = _sum(totals, [gradients for _, gradients in outcomes])
            if (number + 1) % per_update:
                continue
            for s, (master, optimizer) in enumerate(zip(masters, optimizers)):
                step = min(first + (number + case.num_stages - 1 - s) // case.num_micro_batches, end - 1)
                optimizer.param_groups[0]["lr"] = case.learning_rate(step)
                for index, (key, parameter) in enumerate(master.named_parameters()):
                    if any((s, key) == second for _, second in ties(case)):
                        continue
                    means = [total[s][index] / per_update for total in totals]
                    parameter.grad = sum(means[1:], means[0]) / case.num_replicas
                optimizer.step()
                for (home, name), (other, other_name) in ties(case):
                    masters[other].get_parameter(other_name).data.copy_(masters[home].get_parameter(name).data)
                versions[s].append(_snapshot(master))
            totals = []
        losses += [float(torch.stack(part).mean()) for part in _in_parts(values, case.num_micro_batches)]
    for master, stage in zip(masters, replicas[0]):
        stage.load_state_dict(dict(stage.state_dict()) | _snapshot(master))
    return losses, [stage.state_dict() for stage in replicas[0]], replicas[0]


def _gradients(
    stages: list[nn.Module], weights: list[dict[str, Tensor]], inputs: Tensor, targets: Tensor
) -> tuple[Tensor, list[list[Tensor]]]:
    leaves = [{name: value.clone().requires_grad_() for name, value in part.items()} for part in weights]
    value = inputs
    for stage, part in zip(stages, leaves):
        value = functional_call(stage, part, (value,))
    result = loss(value, targets)
    found = torch.autograd.grad(result, [leaf for part in leaves for leaf in part.values()])
    iterator = iter(found)
    return result.detach(), [[next(iterator) for _ in part] for part in leaves]


def _sum(totals: list[list[list[Tensor]]], new: list[list[list[Tensor]]]) -> list[list[list[Tensor]]]:
    if not totals:
        return new
    return [
        [[a + b for a, b in zip(*stages)] for stages in zip(old_replica, new_replica)]
        for old_replica, new_replica in zip(totals, new)
    ]


def _snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _in_parts(values: list[Tensor], size: int) -> list[list[Tensor]]:
    return [values[start : start + size] for start in range(0, len(values), size)]

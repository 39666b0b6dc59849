"""The proof, for users: a few float64 steps in parallel and in one process, compared tensor by tensor.

verify ─► torchrun -m meshwise.run.verify CLAIM.json ─► every rank trains its part
                                                       rank 0 then trains the whole, compares, writes the result
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from meshwise.errors import RankError
from meshwise.run.job import OptimizerSettings
from meshwise.strategy import Strategy
from meshwise.strategy.legal import check

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwise.run.reference import Trained
    from meshwise.zoo import Task

_LEARNING_RATE = {"sgd": 0.01, "adam": 1e-3, "adamw": 1e-3}
_TIMEOUT = 1800.0


class Claim(BaseModel):
    """What is to be proven, as a file the ranks read."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: str
    strategy: Strategy
    num_steps: int
    global_batch_size: int
    clip_norm: float
    optimizer: OptimizerSettings
    tolerance: float
    result: Path
    seed: int = 0


class Verification(BaseModel):
    """How far the parallel run is from one process.

    Attributes:
        identical: every difference is within ``tolerance``.
        worst: largest difference, relative to the largest entry of its layer (or to the loss).
        worst_name: where: a parameter's name, or ``loss``.
        first_name: first parameter in the model's order that differs by more than ``tolerance``; empty if none.
        losses, reference_losses: per step.
        notes: what the comparison takes for the same training, where the strategy leaves a choice.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    identical: bool
    tolerance: float
    num_steps: int
    worst: float
    worst_name: str
    first_name: str
    first_difference: float
    losses: list[float]
    reference_losses: list[float]
    notes: list[str]

    def describe(self) -> str:
        """One sentence, and a line for each note."""
        if self.identical:
            how = "bit for bit" if self.worst == 0 else f"to {self.worst:.0e}"
            text = f"identical {how} (losses and parameters, {self.num_steps} steps, float64)"
        elif self.first_name:
            text = f"differs: {self.first_name} is the first tensor off, by {self.first_difference:.1e} relative"
            if self.worst_name != self.first_name:
                text += f"; largest is {self.worst_name}, by {self.worst:.1e}"
        else:
            text = f"differs: the losses, by {self.worst:.1e} relative"
        return "\n".join([text, *(f"  {note}" for note in self.notes)])


def verify(
    *,
    model: str,
    strategy: Strategy,
    num_steps: int = 10,
    global_batch_size: int | None = None,
    clip_norm: float = 0.0,
    optimizer: str = "sgd",
    tolerance: float = 1e-12,
) -> Verification:
    """Trains ``model`` both ways on CPU processes, dropout off, and compares losses and parameters.

    Args:
        global_batch_size: default: two samples a micro-batch.
        optimizer: ``sgd`` (with momentum), ``adam`` or ``adamw``.

    Raises:
        InputError: the model cannot be had, or the strategy does not fit it.
        RankError: a process failed; the message has its reason.
    """
    from meshwise.zoo import get_task

    parts = strategy.data_parallel_size * strategy.num_micro_batches
    task = get_task(model)
    batch = global_batch_size or 2 * parts
    check(strategy, _facts(task), batch, clip_norm=clip_norm)
    with tempfile.TemporaryDirectory(prefix="meshwise-verify-") as folder:
        claim = Claim(
            model=model,
            strategy=strategy,
            num_steps=num_steps,
            global_batch_size=batch,
            clip_norm=clip_norm,
            optimizer=OptimizerSettings.model_validate({"name": optimizer, "learning_rate": _LEARNING_RATE[optimizer]}),
            tolerance=tolerance,
            result=Path(folder) / "result.json",
        )
        log = _run_ranks(claim, Path(folder))
        if not claim.result.exists():
            raise RankError(f"{strategy}: a rank failed; {_last_error(log)}")
        return Verification.model_validate_json(claim.result.read_text(encoding="utf-8"))


def _facts(task: Task) -> Any:
    import torch

    from meshwise.run.chain import facts

    with torch.device("meta"):
        return facts(task.build(), task.name, sequence_length=task.sequence_length)


def _run_ranks(claim: Claim, folder: Path) -> str:
    """Output of all ranks. They end with this process, or when time is up."""
    path = folder / "claim.json"
    path.write_text(claim.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(claim.strategy.num_devices), "--max-restarts", "0"]
    command += ["--log-dir", str(folder / "log"), "-m", "meshwise.run.verify", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWISE_LAUNCHER": str(os.getpid())}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RankError(f"{claim.strategy} did not finish in {_TIMEOUT:.0f} s; use fewer --steps") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks die with it: see worker.die_with_parents
                process.wait()
    return log.read_text(encoding="utf-8", errors="replace")


def _last_error(log: str) -> str:
    """The line of the log that says most: the first exception that is not torchrun's own."""
    found = re.findall(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*)$", log, re.MULTILINE)
    own = [line for line in found if "ChildFailedError" not in line and "elastic" not in line]
    return own[0] if own else "it left no message"


def _rank_main(claim: Claim) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if claim.strategy.num_devices > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT))
    losses, state = _train_parallel(claim)
    if state:
        claim.result.write_text(_compare(claim, losses, state).model_dump_json(), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()


def _train_parallel(claim: Claim) -> tuple[list[float], dict[str, Tensor]]:
    """Mean loss of every step and the whole parameters; both on rank 0 only."""
    import torch.distributed as dist

    from meshwise.run.apply import parallelize

    task, module, batches = _prepare(claim)
    executor = parallelize(
        module,
        claim.strategy,
        loss=task.loss,
        optimizer=_optimizer(claim),
        device="cpu",
        clip_norm=claim.clip_norm,
        example=batches[0][0],
        global_batch_size=claim.global_batch_size,
    )
    replicas, own = executor.groups.size("data"), executor.groups.index("data")
    results = [executor.step(x.chunk(replicas)[own], y.chunk(replicas)[own]) for x, y in batches]
    executor.flush()
    losses = [float(result.loss) for result in results if result.loss is not None]
    everyone: list[Any] = [losses]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, losses)
    rows = [row for row in everyone if row]
    state = executor.state()
    return [sum(column) / len(rows) for column in zip(*rows)], state


def _compare(claim: Claim, losses: Sequence[float], state: dict[str, Tensor]) -> Verification:
    from meshwise.run.reference import Recipe, train_reference

    task, module, batches = _prepare(claim)
    recipe = Recipe(
        strategy=claim.strategy,
        loss=task.loss,
        optimizer=_optimizer(claim),
        clip_norm=claim.clip_norm,
        example=batches[0][0],
    )
    reference = train_reference(module, batches, recipe)
    differences = _differences(state, reference)
    loss_difference = max(_relative(a, b) for a, b in zip(losses, reference.losses, strict=True))
    first = next(((name, d) for name, d in differences.items() if not d <= claim.tolerance), ("", 0.0))
    worst_name, worst = max({**differences, "loss": loss_difference}.items(), key=lambda item: item[1])
    return Verification(
        identical=worst <= claim.tolerance,
        tolerance=claim.tolerance,
        num_steps=claim.num_steps,
        worst=worst,
        worst_name=worst_name,
        first_name=first[0],
        first_difference=first[1],
        losses=list(losses),
        reference_losses=reference.losses,
        notes=_notes(claim.strategy, module),
    )


def _differences(state: dict[str, Tensor], reference: Trained) -> dict[str, float]:
    """Per parameter, in the model's order: largest difference over the largest entry in its layer.

    The layer's and not its own: a bias before a batch norm has a gradient of zero in exact arithmetic, so that one that
    began as zero consists of rounding alone.
    """
    found = {}
    scales: dict[str, float] = {}
    for name, expected in reference.parameters.items():
        layer = name.rpartition(".")[0]
        scales[layer] = max(scales.get(layer, 0.0), float(expected.abs().max()))
    for name, expected in reference.parameters.items():
        if name in state:
            scale = scales[name.rpartition(".")[0]] or 1.0
            difference = float((state[name] - expected).abs().max()) / scale
            found[name] = math.inf if math.isnan(difference) else difference
        elif not any(name in names and names & state.keys() for names in reference.tied):
            found[name] = math.inf  # a parameter the parallel run lost is as different as can be
    return found


def _relative(ours: float, theirs: float) -> float:
    """Relative difference; infinite where ours is not a number, so that no comparison can overlook it."""
    difference = abs(ours - theirs) / max(abs(theirs), sys.float_info.min)
    return math.inf if math.isnan(difference) else difference


def _notes(strategy: Strategy, module: nn.Module) -> list[str]:
    from meshwise.run.batch_norm import has_batch_norm

    notes = []
    if strategy.asynchronous:
        notes.append("the reference is the published update rule, with its stale weights")
    elif has_batch_norm(module) and strategy.data_parallel_size * strategy.num_micro_batches > 1:
        whose = (
            "all replicas' micro-batches together" if strategy.batch_norm == "sync" else "each replica's micro-batch"
        )
        notes.append(f"batch norm's statistics, in both runs, are those of {whose}")
    return notes


def _prepare(claim: Claim) -> tuple[Task, nn.Module, list[tuple[Tensor, Tensor]]]:
    """The same task, weights and batches wherever it is called. Dropout is off: its masks cannot be the same."""
    import torch

    from meshwise.zoo import get_task

    task = get_task(claim.model)
    torch.manual_seed(claim.seed)
    module = task.build().double()
    for layer in module.modules():
        if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
            layer.p = 0.0
    generator = torch.Generator().manual_seed(claim.seed + 1)
    batches = [task.example_inputs(claim.global_batch_size, generator) for _ in range(claim.num_steps)]
    return task, module, [(x.double() if x.is_floating_point() else x, y) for x, y in batches]


def _optimizer(claim: Claim) -> Any:
    import torch

    settings = claim.optimizer

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if settings.name == "sgd":
            return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=settings.momentum)
        kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
        return kind(parameters, lr=settings.learning_rate)

    return make


if __name__ == "__main__":
    from meshwise.run.worker import die_with_parents

    die_with_parents()
    _rank_main(Claim.model_validate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    sys.stdout.flush()
    os._exit(0)

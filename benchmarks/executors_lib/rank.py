"""One process of a comparison: builds every contestant, checks that they train alike, and times them in turn.

Started by ``launch.py`` with torchrun's environment variables; rank 0 writes its findings as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executors_lib.cases import CASES, Case
from executors_lib.comparisons import COMPARISONS, Comparison, ours
from executors_lib.hand import Step
from executors_lib.peers import installed

OURS = "meshwise"
WARM_UP_STEPS = 4
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Block:
    """A few steps of one contestant: seconds by the slowest rank's clock, and processor seconds of all ranks."""

    wall: float
    processor: float


class Batches:
    """This rank's share of a few batches, over and over."""

    def __init__(self, case: Case, *, split: bool) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = [case.batch(number) for number in range(NUM_BATCHES)]
        self.own = [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in whole] if split else whole

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.own[number % NUM_BATCHES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--comparison", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=8))
    found = compare(COMPARISONS[options.comparison], CASES[options.case], options.rounds, options.steps)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that ends the usual way


def compare(comparison: Comparison, case: Case, num_rounds: int, steps: int) -> dict[str, Any]:
    """Per contestant: ``status``, the loss after the warm-up, and its blocks' seconds."""
    batches = Batches(case, split=comparison.split)
    missing = {o.name: "not installed" for o in comparison.opponents if o.package and not installed(o.package)}
    builders: dict[str, Callable[[Case], Step]] = {
        OURS: ours(comparison.strategy, global_batch_size=case.global_batch_size, example=case.batch(0)[0])
    }
    builders |= {o.name: o.build for o in comparison.opponents if o.name not in missing}
    steppers: dict[str, Step] = {}
    losses: dict[str, float] = {}
    for name, build in builders.items():
        trouble = _prepare(name, build, case, batches, steppers, losses)
        if trouble:
            missing[name] = trouble
    blocks: dict[str, list[Block]] = {name: [] for name in steppers}
    for number in range(num_rounds):
        order = list(steppers) if number % 2 == 0 else list(steppers)[::-1]
        for name in order:
            blocks[name].append(_time(steppers[name], batches, steps))
    return {
        "missing": missing,
        "losses": losses,
        "wall": {name: [block.wall / steps for block in found] for name, found in blocks.items()},
        "processor": {name: [block.processor / steps for block in found] for name, found in blocks.items()},
    }


def _prepare(
    name: str,
    build: Callable[[Case], Step],
    case: Case,
    batches: Batches,
    steppers: dict[str, Step],
    losses: dict[str, float],
) -> str:
    """Builds and warms up one contestant on all ranks; what went wrong, if anything did."""
    trouble = ""
    last: float | None = None
    try:
        with _quiet():
            step = build(case)
            for number in range(WARM_UP_STEPS):
                loss = step(*batches[number])
            last = None if loss is None else float(loss)
    except Exception as error:
        if name == OURS:
            raise
        traceback.print_exc()
        trouble = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (trouble, last))
    trouble = next((text for text, _ in everyone if text), "")
    if not trouble:
        steppers[name] = step
        held = [value for _, value in everyone if value is not None]
        losses[name] = sum(held) / len(held) if held else float("nan")
    return trouble


def _time(step: Step, batches: Batches, steps: int) -> Block:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for number in range(steps):
        step(*batches[number])
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - processor], dtype=torch.float64)
    gathered = [torch.empty_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, spent)
    everyone = torch.stack(gathered)
    return Block(wall=float(everyone[:, 0].max()), processor=float(everyone[:, 1].sum()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Peers print banners: all output to stderr, which the launcher keeps."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()

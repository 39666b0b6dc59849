"""Runs a function on several gloo processes, forked from one server that has torch loaded already.

``spawn(function, 4, argument)`` calls ``function(rank, argument)`` on 4 ranks with a process group ready and returns
the four results. The forkserver makes this cost a tenth of a second instead of several.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.optim",
    "torch._dynamo",
    "torchvision.models",
    "transformers.models.gpt2.modeling_gpt2",
    "meshwise.run.apply",
]


def spawn(function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """Results of ``function(rank, *arguments)`` by rank; the first rank's traceback is raised if any fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = str(Path(folder) / "rendezvous")
        processes = [
            context.Process(
                target=_rank_main, args=(function, rank, num_ranks, meeting_point, results, arguments, timeout)
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < num_ranks:
                if not _wait(results, processes, timeout):
                    raise AssertionError(
                        f"ranks {sorted(set(range(num_ranks)) - set(found))} gave no answer; exit codes "
                        f"{[process.exitcode for process in processes]}"
                    )
                rank, ok, payload = results.get()
                value = pickle.loads(payload)
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                found[rank] = value
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
    return [found[rank] for rank in range(num_ranks)]


def _wait(results: Any, processes: list[Any], timeout: float) -> bool:
    """Whether a result is there; False when a process died without one or time ran out."""
    waited = 0.0
    while not results._reader.poll(0.2):
        waited += 0.2
        dead = [process for process in processes if process.exitcode not in (None, 0)]
        if waited > timeout or (dead and not results._reader.poll(2.0)):
            return False
    return True


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    meeting_point: str,
    results: Any,
    arguments: tuple[Any, ...],
    timeout: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        answer = (rank, True, function(rank, *arguments))
    except Exception:
        answer = (rank, False, traceback.format_exc())
    # Pickled here: torch's own way over a queue hands out shared memory that dies with this process.
    results.put((*answer[:2], pickle.dumps(answer[2])))
    os._exit(0)

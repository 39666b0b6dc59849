"""Other libraries with the same model, batch and number of processes. None is needed; each is imported when built.

Each function builds one contestant, as in ``hand.py``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executors_lib.cases import OPTIMIZER, SETTINGS, Case, loss, optimizer
from executors_lib.hand import NUM_MICRO_BATCHES, Step, stages_of


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def accelerate(case: Case) -> Step:
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)  # without cpu=True every rank would train alone
    module = case.build()
    model, update = helper.prepare(module, optimizer(module.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        update.zero_grad()
        value = loss(model(inputs), targets)
        helper.backward(value)
        update.step()
        return value.detach()

    return step


def fairscale_1(case: Case) -> Step:
    """OSS with DDP: optimizer state sharded."""
    from torch.nn.parallel import DistributedDataParallel

    module = case.build()
    update = _fairscale_optimizer(module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    return _fairscale_loop(model, update)


def fairscale_2(case: Case) -> Step:
    """OSS with ShardedDDP: gradients go to the rank that updates with them."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    module = case.build()
    update = _fairscale_optimizer(module)
    return _fairscale_loop(ShardedDataParallel(module, update, broadcast_buffers=False), update)


def _fairscale_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    from fairscale.optim.oss import OSS

    return OSS(module.parameters(), optim=OPTIMIZER, **SETTINGS)


def _fairscale_loop(model: nn.Module, update: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        # With today's default, set_to_none=True, fairscale 0.4.13 computes wrong updates from the third step on.
        update.zero_grad(set_to_none=False)
        value = loss(model(inputs), targets)
        value.backward()
        update.step()
        return value.detach()

    return step


def deepspeed(stage: int) -> Callable[[Case], Step]:
    """ZeRO of one stage; its first run on a machine compiles an extension, which takes minutes."""

    def build(case: Case) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed as library

        module = case.build()
        local_batch_size = case.global_batch_size // dist.get_world_size()
        settings = {
            "train_micro_batch_size_per_gpu": local_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # clips to a norm of 1 unless told
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = library.initialize(
            model=module, optimizer=optimizer(module.parameters()), config=settings, dist_init_required=False
        )

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            value = loss(engine(inputs), targets)
            engine.backward(value)
            engine.step()
            return value.detach()

        return step

    return build


def torchgpipe(case: Case) -> Step | None:
    """One process for all stages, as it is made; on CPU they share one worker thread. Rank 0 runs it, others rest.

    It refuses tied weights: the output layer gets a copy.
    """
    from torchgpipe import GPipe

    stages = stages_of(case, 1)
    if dist.get_rank() > 0:
        return lambda inputs, targets: None
    layers = [layer for stage in stages for layer in stage]
    if layers[-1].weight is next(layers[0].parameters()):
        layers[-1].weight = nn.Parameter(layers[-1].weight.detach().clone())
    model = GPipe(
        nn.Sequential(*layers),
        balance=[len(stage) for stage in stages],
        devices=["cpu"] * len(stages),
        chunks=NUM_MICRO_BATCHES,
        checkpoint="never",
    )
    update = optimizer(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        update.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        update.step()
        return value.detach()

    return step

"""Your own model, data and training loop, split by meshwise. Start it with torchrun:

    torchrun --nproc-per-node 4 examples/own_loop.py zero=3,data=2,tensor=2

and try zero2, 1f1b, tensor, data=2,pipeline=2 … or no launcher at all: python examples/own_loop.py single
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import meshwise

GLOBAL_BATCH_SIZE = 64


def main(strategy: str) -> None:
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    torch.manual_seed(0)  # the same weights and the same sample order on every process
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    executor = meshwise.parallelize(
        nn.Sequential(*layers),
        strategy,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch_size=GLOBAL_BATCH_SIZE,
    )
    digits, device = load_digits(), executor.groups.device
    images = torch.tensor(digits.images, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    replicas, own = executor.groups.size("data"), executor.groups.index("data")
    for epoch in range(5):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH_SIZE)[:-1]:
            part = batch.chunk(replicas)[own]  # this replica's part of the global batch
            executor.step(images[part], labels[part])
        executor.flush()  # asynchronous pipelines: let what is in flight finish
        found = executor.evaluate(images[1500:], labels[1500:])
        if found is not None and own == 0:  # None where the last stage is not
            print(f"epoch {epoch + 1}: accuracy {found.num_correct / found.num_targets:.3f}")

    if weights := executor.state():  # whole, under the names of your module, on rank 0
        print(f"{executor.strategy}: {sum(w.numel() for w in weights.values()):,} parameters", flush=True)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
    sys.stdout.flush()
    os._exit(0)

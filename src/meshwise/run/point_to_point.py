"""Tensors from one pipeline stage to the next and back, with ``isend``/``irecv`` only.

Blocking ``send``/``recv`` cost a whole scheduler slice (about 2 ms) per message as soon as another process wants the
core, and two stages that both send first wait for each other for ever; non-blocking transfers do neither.

On CPU (gloo) every message has a tag and one group serves both directions. NCCL ignores tags and runs the transfers
between two ranks of one communicator in order, so that a forward and a backward message can wait for each other:
there each direction has its own group, and tied weights have two more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.errors import ModelError
from meshwise.run.groups import Groups

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 8
_HEADER_SIZE = 2 + _MAX_DIMS
_TAG_PERIOD = 2**24
"""Tags are 32-bit; a micro-batch this many later may use the same tag again."""

FORWARD, BACKWARD, HEADER, CHAIN, STATE, TIED_VERSION, TIED_GRADIENT = _KINDS = range(7)
"""Kinds of message, so that none can be taken for another."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a receiver must know before it can receive."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(sizes=tuple(tensor.shape), dtype=tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A message under way. The tensor must stay alive and unchanged until ``wait`` returns, so it is held here."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class StageLink:
    """This rank's connection to the stages before and after it. Made by all ranks at the same time.

    Attributes:
        stage, num_stages: position on the pipeline axis.
        is_first, is_last: whether this is the stage that takes the inputs, or gives the outputs.
    """

    def __init__(self, groups: Groups, *, tied: bool = False) -> None:
        """``tied``: weights are shared by stages, so that their versions and gradients are sent too."""
        self.stage = groups.index("pipeline")
        self.num_stages = groups.size("pipeline")
        self.device = groups.device
        self._ranks = groups.ranks("pipeline")
        forward, backward, *more = _direction_groups(groups, 4 if tied else 2)
        self._groups = {FORWARD: forward, HEADER: forward, CHAIN: forward, STATE: backward, BACKWARD: backward}
        self._groups |= dict(zip((TIED_VERSION, TIED_GRADIENT), more))

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def send(self, tensor: Tensor, stage: int, *, kind: int, number: int = 0) -> Transfer:
        """Starts sending a tensor whose shape the receiver knows; ``number`` tells messages of one kind apart."""
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._ranks[stage], group=self._groups[kind], tag=_tag(kind, number))
        return Transfer(tensor=tensor, work=work)

    def receive(self, shape: Shape, stage: int, *, kind: int, number: int = 0) -> Transfer:
        """Starts receiving; ``wait`` gives the tensor."""
        tensor = torch.empty(shape.sizes, dtype=shape.dtype, device=self.device)
        work = dist.irecv(tensor, self._ranks[stage], group=self._groups[kind], tag=_tag(kind, number))
        return Transfer(tensor=tensor, work=work)

    def send_shape(self, shape: Shape, stage: int, *, kind: int = HEADER, number: int = 0) -> Transfer:
        """Starts telling another stage what it will receive.

        Raises:
            ModelError: a tensor with more than 8 dims or of a dtype that cannot be sent.
        """
        if len(shape.sizes) > _MAX_DIMS or shape.dtype not in _DTYPES:
            raise ModelError(
                f"a tensor of {len(shape.sizes)} dims and {shape.dtype} cannot go from stage to stage; pass one of at "
                f"most {_MAX_DIMS} dims and a real dtype"
            )
        padding = [0] * (_MAX_DIMS - len(shape.sizes))
        header = [_DTYPES.index(shape.dtype), len(shape.sizes), *shape.sizes, *padding]
        return self.send(torch.tensor(header, device=self.device), stage, kind=kind, number=number)

    def receive_shape(self, stage: int, *, kind: int = HEADER, number: int = 0) -> Shape:
        """Waits for what ``send_shape`` sent."""
        header_shape = Shape(sizes=(_HEADER_SIZE,), dtype=torch.int64)
        dtype, num_dims, *sizes = self.receive(header_shape, stage, kind=kind, number=number).wait().tolist()
        return Shape(sizes=tuple(sizes[:num_dims]), dtype=_DTYPES[dtype])

    def send_any(self, tensor: Tensor, stage: int, *, kind: int = CHAIN) -> None:
        """Sends a tensor of any shape and waits until it has left."""
        transfers = [self.send_shape(Shape.of(tensor), stage, kind=kind), self.send(tensor, stage, kind=kind)]
        for transfer in transfers:
            transfer.wait()

    def receive_any(self, stage: int, *, kind: int = CHAIN) -> Tensor:
        """Waits for what ``send_any`` sent."""
        return self.receive(self.receive_shape(stage, kind=kind), stage, kind=kind).wait()

    def send_next(self, tensor: Tensor) -> None:
        """Hands a tensor of any shape to the next stage; for passes without a backward."""
        self.send_any(tensor, self.stage + 1)

    def receive_previous(self) -> Tensor:
        """Waits for what the stage before handed on."""
        return self.receive_any(self.stage - 1)


def _tag(kind: int, number: int) -> int:
    return kind + len(_KINDS) * (number % _TAG_PERIOD)


def _direction_groups(groups: Groups, count: int) -> list[dist.ProcessGroup | None]:
    """Groups over this rank's pipeline for ``count`` directions of messages: all its own on an accelerator, one on CPU.

    They are new: ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` counts a rank's messages among its collectives, and stages do not
    all send equally many, so that a collective in a group that has carried messages is taken for a mismatch.
    """
    own: list[dist.ProcessGroup | None] = [None] * count
    if groups.size("pipeline") == 1:
        return own
    # every rank must take part in making every group, and in the same order
    for ranks in sorted({groups.mesh.group("pipeline", rank) for rank in range(groups.mesh.num_devices)}):
        num_groups = 1 if groups.device.type == "cpu" else count
        made = [cast(dist.ProcessGroup, dist.new_group(list(ranks))) for _ in range(num_groups)]
        if groups.rank in ranks:
            own = [made[index % num_groups] for index in range(count)]
    return own

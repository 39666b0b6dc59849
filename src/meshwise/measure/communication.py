"""Bytes a rank communicates, by kind of collective, seen where every backend passes: torch's operator dispatcher.

DDP, dist.*  ─► c10d::allreduce_, c10d::_allgather_base_ (FSDP2), c10d::send …           ┐
DTensor      ─► _c10d_functional::all_gather_into_tensor, reduce_scatter_tensor …        ┴─► Counter
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

_logical: ContextVar[str | None] = ContextVar("meshwise_logical_kind", default=None)


@contextmanager
def logical_kind(kind: str) -> Iterator[None]:
    """Collectives started inside count as ``kind``, whatever primitives they are made of on this backend."""
    token = _logical.set(kind)
    try:
        yield
    finally:
        _logical.reset(token)


@dataclass
class Count:
    calls: int = 0
    bytes: int = 0


Payload = Callable[[tuple[Any, ...], Any], Any]
"""(arguments, result) of an operator → the tensors, nested or not, that are its payload."""


def _first(arguments: tuple[Any, ...], result: Any) -> Any:
    return arguments[0]


def _second(arguments: tuple[Any, ...], result: Any) -> Any:
    return arguments[1]


def _result(arguments: tuple[Any, ...], result: Any) -> Any:
    return result


def _from_root(arguments: tuple[Any, ...], result: Any) -> Any:
    """A broadcast's tensors on the rank that has them; the others hand in nothing."""
    tensors, group, root = arguments[:3]
    return tensors if dist.ProcessGroup.unbox(group).rank() == root else ()


def _functional_from_root(arguments: tuple[Any, ...], result: Any) -> Any:
    tensor, root, group = arguments[:3]
    resolved = _resolve_process_group(group)
    return tensor if dist.get_group_rank(resolved, dist.get_rank()) == root else ()


OPERATORS: dict[str, tuple[str, Payload]] = {
    "c10d::allreduce_": ("all_reduce", _first),
    "c10d::allreduce_coalesced_": ("all_reduce", _first),
    "c10d::allgather_": ("all_gather", _first),
    "c10d::allgather_coalesced_": ("all_gather", _first),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _first),
    "c10d::_allgather_base_": ("all_gather", _first),
    "c10d::reduce_scatter_": ("reduce_scatter", _second),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _second),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second),
    "c10d::alltoall_": ("all_to_all", _second),
    "c10d::alltoall_base_": ("all_to_all", _second),
    "c10d::broadcast_": ("broadcast", _from_root),
    "c10d::reduce_": ("reduce", _first),
    "c10d::gather_": ("gather", _second),
    "c10d::gather_into_tensor_": ("gather", _second),
    "c10d::scatter_": ("scatter", _first),
    "c10d::send": ("send", _first),
    "c10d::recv_": ("recv", _first),
    "c10d::recv_any_source_": ("recv", _first),
    "_c10d_functional::all_reduce": ("all_reduce", _first),
    "_c10d_functional::all_reduce_": ("all_reduce", _first),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _first),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", _first),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _result),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _result),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _result),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _first),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _first),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", _first),
    "_c10d_functional::all_to_all_single": ("all_to_all", _first),
    "_c10d_functional::broadcast": ("broadcast", _functional_from_root),
    "_c10d_functional::broadcast_": ("broadcast", _functional_from_root),
    "_c10d_functional::isend": ("send", _first),
    "_c10d_functional::irecv": ("recv", _first),
}
"""Operator → (kind, what of it is payload): what is handed in, except for a gather, where it is what comes out."""


class CommunicationCounter(TorchDispatchMode):
    """Counts, while active, calls and payload bytes of every collective and message of this rank.

    ``counts`` maps a kind (``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast``,
    ``send``, ``recv``) to a ``Count``. A group of one rank counts like any other: the call was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Count] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_is_dtensor, types)):
            return NotImplemented  # DTensor makes local operators and collectives of it, which come here again
        result = func(*args, **(kwargs or {}))
        found = OPERATORS.get(func._schema.name)
        if found is not None:
            kind, payload = _logical.get() or found[0], found[1]
            count = self.counts.setdefault(kind, Count())
            count.calls += 1
            count.bytes += _num_bytes(payload(args, result))
        return result


def _is_dtensor(kind: type) -> bool:
    """By name: importing DTensor takes a third of a second, which a run without it need not spend."""
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__)


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return 0

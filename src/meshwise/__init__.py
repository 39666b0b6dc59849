"""meshwise: know how to split your training before you pay for it, and prove it by running it.

    import meshwise

    executor = meshwise.parallelize(module, "data=2,tensor=2", loss=loss, optimizer=optimizer)

Names load when they are first used: ``import meshwise`` alone imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshwise.errors import MeshwiseError
    from meshwise.record import Record
    from meshwise.run.apply import parallelize
    from meshwise.run.executor import Executor
    from meshwise.run.verify import verify
    from meshwise.strategy import Mesh, Schedule, Strategy
    from meshwise.strategy.strategy import parse

_HOMES = {
    "Executor": "meshwise.run.executor",
    "Mesh": "meshwise.strategy",
    "MeshwiseError": "meshwise.errors",
    "Record": "meshwise.record",
    "Schedule": "meshwise.strategy",
    "Strategy": "meshwise.strategy",
    "parallelize": "meshwise.run.apply",
    "parse": "meshwise.strategy.strategy",
    "verify": "meshwise.run.verify",
}

__all__ = [
    "Executor",
    "Mesh",
    "MeshwiseError",
    "Record",
    "Schedule",
    "Strategy",
    "parallelize",
    "parse",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'meshwise' has no attribute {name!r}")

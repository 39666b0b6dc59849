"""Everything meshwise raises on purpose.

MeshwiseError
├── InputError            something asked for cannot be; exit code 2
│   ├── StrategyError     a strategy that cannot exist, or not for this model, batch or device count
│   ├── ModelError        a model that cannot be found, built or split as asked
│   ├── GraphError        a graph that does not hold together, or a graph file that cannot be read
│   ├── DataError         data that cannot be found or read
│   ├── UnitError         a quantity without its unit, or with the wrong one
│   └── OutputError       an output folder that cannot be written or would be overwritten
└── RunError              something went wrong while running; exit code 1
    ├── RankError         one rank raised, was killed or ran out of memory
    ├── HangError         a rank made no progress for longer than the watchdog allows
    └── DivergedError     the loss is no longer a finite number

Messages read ``{given} {why not}; {nearest thing that works}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshwiseError(Exception):
    """Root of the tree; ``exit_code`` is what the command line returns."""

    exit_code = 1


class InputError(MeshwiseError):
    exit_code = 2


class StrategyError(InputError):
    pass


class ModelError(InputError):
    pass


class GraphError(InputError):
    pass


class DataError(InputError):
    pass


class UnitError(InputError):
    pass


class OutputError(InputError):
    pass


class RunError(MeshwiseError):
    pass


class RankError(RunError):
    pass


class HangError(RunError):
    pass


class DivergedError(RunError):
    pass


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The remedy clause for a misspelt name: the nearest known one, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"

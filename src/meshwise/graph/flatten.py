"""Writing out the repetitions of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwise.graph.graph import Graph, Repeat
from meshwise.graph.operator import Operator
from meshwise.graph.tensor import Tensor


def flatten(graph: Graph) -> Graph:
    """Every repetition of every block as operators of their own, under their own modules' names; all counts are 1."""
    if not graph.repeats:
        return graph
    operators: list[Operator] = []
    tensors: dict[str, Tensor] = {}
    current: dict[str, str] = {}  # name in the graph → the flat tensor it means to whatever comes next
    position = 0
    for repeat in graph.repeats:
        operators += [_renamed(o, current) for o in graph.operators[position : repeat.start]]
        inside = graph.operators[repeat.start : repeat.stop]
        own = _own_tensors(graph, repeat)
        for iteration in range(repeat.count):
            rename = renaming(repeat, iteration)
            names = {name: rename(name) for name in own}
            tensors.update({names[name]: replace(graph.tensors[name], name=names[name], count=1) for name in own})
            lookup = {**current, **names}
            operators += [
                replace(_renamed(o, lookup), name=rename(o.name), module=rename(o.module), count=1) for o in inside
            ]
            current |= {read: lookup.get(made, made) for read, made in repeat.carried}
            last = names
        # What follows reads the last repetition's tensors, and what the block first read keeps its own name.
        for read, _ in repeat.carried:
            current.pop(read, None)
        current |= {made: last.get(made, made) for made in own}
        position = repeat.stop
    operators += [_renamed(o, current) for o in graph.operators[position:]]
    inside_names = {name for repeat in graph.repeats for name in _own_tensors(graph, repeat)}
    outside = {name: tensor for name, tensor in graph.tensors.items() if name not in inside_names}
    return replace(graph, operators=tuple(operators), tensors={**outside, **tensors}, repeats=())


def renaming(repeat: Repeat, iteration: int) -> Callable[[str], str]:
    """Name in the first repetition → name in repetition ``iteration``."""
    pairs = sorted(zip(repeat.modules[0], repeat.modules[iteration]), key=lambda pair: -len(pair[0]))

    def rename(name: str) -> str:
        for first, other in pairs:
            if name == first or (name.startswith(first) and name[len(first)] in "./"):
                return other + name[len(first) :]
        return name

    return rename


def _own_tensors(graph: Graph, repeat: Repeat) -> list[str]:
    """Tensors each repetition has for itself: those whose name it changes."""
    prefixes = repeat.modules[0]
    return [
        name
        for name in graph.tensors
        if any(name == prefix or (name.startswith(prefix) and name[len(prefix)] in "./") for prefix in prefixes)
    ]


def _renamed(operator: Operator, names: dict[str, str]) -> Operator:
    def look(wanted: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in wanted)

    return replace(
        operator,
        inputs=look(operator.inputs),
        outputs=look(operator.outputs),
        parameters=look(operator.parameters),
        saved=look(operator.saved),
    )

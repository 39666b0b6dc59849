"""Graph: the forward pass of a model at one batch, as operators with tensors on the edges. Immutable.

A block that occurs many times in a row stands once, with a ``Repeat`` that says how often and under which names; sums
multiply by ``count``, and ``flatten`` writes it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwise.errors import GraphError
from meshwise.graph.flop import Work, matrix_work
from meshwise.graph.operator import Operator
from meshwise.graph.tensor import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """Operators ``start:stop`` run once for each entry of ``modules``, each reading what the one before made.

    Attributes:
        start, stop: slice of ``Graph.operators``; these are the first of the repetitions.
        modules: per repetition the module prefixes it goes by; entry 0 has the names in the graph. A period of
            two layers has two prefixes: ``(("layers.0", "layers.1"), ("layers.2", "layers.3"))``.
        carried: (tensor read, tensor made): what a repetition reads in place of the first, the next repetition reads
            in place of the second; what follows the block reads the last one's.
    """

    start: int
    stop: int
    modules: tuple[tuple[str, ...], ...]
    carried: tuple[tuple[str, str], ...]

    @property
    def count(self) -> int:
        return len(self.modules)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The forward pass of one micro-batch.

    Attributes:
        name: of the model.
        operators: in an order in which they can run.
        tensors: name → tensor, parameters that no operator reads included.
        repeats: blocks that occur more than once; they do not overlap.
        layers: where a pipeline may cut: per layer, in order, the prefixes of the modules it consists of, each
            repetition under its own name; empty where no chain of layers is known.
        batch_size: samples it was made for; ``sequence_length`` and ``image_size`` 0 where there are none.
        notes: what a reader must know: assumptions made, operators without a formula.

    Raises:
        GraphError: an operator that reads what nobody made, a name used twice, a repeat that does not fit.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    repeats: tuple[Repeat, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()
    batch_size: int = 1
    sequence_length: int = 0
    image_size: int = 0
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        _check(self)

    # Sizes

    @cached_property
    def parameters(self) -> int:
        """Numbers to train, a shared one counted once."""
        return self._elements("parameter")

    @cached_property
    def active_parameters(self) -> int:
        """Those one token meets: of experts, ``experts_per_token`` of ``num_experts``."""
        idle = 0
        for operator in self.operators:
            if operator.kind == "experts":
                total, used = operator.attributes["num_experts"], operator.attributes["experts_per_token"]
                held = sum(self.tensors[name].num_elements for name in operator.parameters)
                idle += operator.count * (held - held * used // total)
        return self.parameters - idle

    @cached_property
    def buffers(self) -> int:
        """Numbers a model holds and does not train."""
        return self._elements("buffer")

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(t.count * t.num_bytes for t in self.tensors.values() if t.role == "parameter")

    @cached_property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """What autograd keeps from forward to backward, each storage once; parameters and buffers are not counted.

        ``count`` of a result says how many are kept. What a repetition keeps of the one before (the input of its first
        norm) stands in the graph as what the first repetition reads; here it is counted among what repetitions make.
        """
        kept = {name: self.tensors[name].count for operator in self.operators for name in operator.saved}
        for repeat in self.repeats:
            inside = {name for operator in self.operators[repeat.start : repeat.stop] for name in operator.saved}
            for read, made in repeat.carried:
                if read in inside and made not in kept and repeat.count > 1:
                    kept[made] = repeat.count - 1
        tensors = (replace(self.tensors[name], count=count) for name, count in kept.items())
        return tuple(tensor for tensor in tensors if tensor.role not in ("parameter", "buffer"))

    @cached_property
    def saved_bytes(self) -> int:
        return sum(tensor.count * tensor.num_bytes for tensor in self.saved_tensors)

    # Work

    @cached_property
    def forward_flop(self) -> int:
        """Of products of matrices, multiply-add = 2, attention in full: what MFU counts."""
        return self.total(lambda work: work.forward.flop, matrix=True)

    @cached_property
    def backward_flop(self) -> int:
        """Of products of matrices, both gradients; what fused attention computes again is left out."""
        return self.total(lambda work: work.backward.flop, matrix=True)

    def total(self, of: Callable[[Work], int], *, matrix: bool = False) -> int:
        """Sum of ``of(work)`` over all operators, repeats included; ``matrix`` leaves all but matrix products out."""
        return sum(
            operator.count * of(matrix_part(operator) if matrix else operator.work) for operator in self.operators
        )

    # Structure

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """Tensor → index of the operator that makes it. An operator that overwrites is its tensor's last producer."""
        return {name: index for index, operator in enumerate(self.operators) for name in operator.outputs}

    def flatten(self) -> Graph:
        """The same graph with every repetition written out and every count 1."""
        from meshwise.graph.flatten import flatten

        return flatten(self)

    def _elements(self, role: str) -> int:
        return sum(tensor.count * tensor.num_elements for tensor in self.tensors.values() if tensor.role == role)


def matrix_part(operator: Operator) -> Work:
    """Work of the operator's products of matrices alone."""
    return matrix_work(operator.kind, operator.attributes).only(
        input_gradient=operator.input_gradient, weight_gradient=operator.weight_gradient
    )


def collect(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """By name.

    Raises:
        GraphError: two of one name.
    """
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise GraphError(f"two tensors are called {tensor.name}; names are unique in a graph")
        found[tensor.name] = tensor
    return found


def _check(graph: Graph) -> None:
    made = {name for name, tensor in graph.tensors.items() if tensor.role in ("input", "parameter", "buffer")}
    names: set[str] = set()
    for operator in graph.operators:
        if operator.name in names:
            raise GraphError(f"two operators of {graph.name} are called {operator.name}; names are unique in a graph")
        names.add(operator.name)
        for tensor in (*operator.inputs, *operator.parameters, *operator.outputs, *operator.saved):
            if tensor not in graph.tensors:
                raise GraphError(f"{operator.name} of {graph.name} names the tensor {tensor}, which the graph lacks")
        for tensor in (*operator.inputs, *operator.parameters):
            if tensor not in made:
                raise GraphError(f"{operator.name} of {graph.name} reads {tensor} before any operator made it")
        made.update(operator.outputs)
    stop = 0
    for repeat in graph.repeats:
        if not stop <= repeat.start < repeat.stop <= len(graph.operators) or repeat.count < 1:
            raise GraphError(
                f"a repeat of {graph.name} spans operators {repeat.start}:{repeat.stop}, which do not exist in order"
            )
        stop = repeat.stop
        for operator in graph.operators[repeat.start : repeat.stop]:
            if operator.count != repeat.count:
                raise GraphError(
                    f"{operator.name} of {graph.name} counts {operator.count} in a block repeated {repeat.count} times"
                )

"""Work and depth of every operator kind: one function each, from sizes alone.

*Work* counts all operations, a multiply-add as 2. *Depth* is the longest chain of operations that must follow each
other when everything else runs at once: a multiplication and a tree of additions for a product, 1 for anything that
works element by element. After the work-depth tables of Ben-Nun and Hoefler 2019 (sections 3 and 4), with constants
instead of O( ), so that numbers of different operators add up.

    forward           y = f(x, w)
    weight_gradient   dL/dw
    input_gradient    dL/dx
    recomputed        what the kernel repeats in backward because forward did not keep it (fused attention)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Pass:
    """``flop`` operations in all, ``depth`` of them in a row."""

    flop: int = 0
    depth: int = 0


NOTHING = Pass()


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    forward: Pass = NOTHING
    weight_gradient: Pass = NOTHING
    input_gradient: Pass = NOTHING
    recomputed: Pass = NOTHING

    def only(self, *, input_gradient: bool, weight_gradient: bool) -> Work:
        """Without the gradients nobody asks for."""
        wanted = self
        if not input_gradient:
            wanted = replace(wanted, input_gradient=NOTHING)
        if not weight_gradient:
            wanted = replace(wanted, weight_gradient=NOTHING)
        if not input_gradient and not weight_gradient:
            wanted = replace(wanted, recomputed=NOTHING)
        return wanted

    @property
    def backward(self) -> Pass:
        """Both gradients; they do not wait for each other. What the kernel recomputes is left out."""
        return Pass(
            self.weight_gradient.flop + self.input_gradient.flop,
            max(self.weight_gradient.depth, self.input_gradient.depth),
        )


def tree(count: int) -> int:
    """Depth of a sum (or maximum) of ``count`` numbers: ⌈log2 count⌉."""
    return max(count - 1, 0).bit_length()


def linear(*, rows: int, in_features: int, out_features: int) -> Work:
    """y [rows, out] = x [rows, in] w + b: 2·rows·in·out for each of y, dw and dx.

    The first term of each sum is a multiplication, the bias the last addition: with a bias the count is exact.
    [Ben-Nun 2019, table 4; dx sums over out_features, so its depth is log out_features, where some copies of the table
    print log in_features.]
    """
    flop = 2 * rows * in_features * out_features
    return Work(
        forward=Pass(flop, 1 + tree(in_features)),
        weight_gradient=Pass(flop, 1 + tree(rows)),
        input_gradient=Pass(flop, 1 + tree(out_features)),
    )


def matmul(*, batch: int, m: int, k: int, n: int) -> Work:
    """y [batch, m, n] = a [batch, m, k] b [batch, k, n], both inputs activations: dx is dy bᵀ and aᵀ dy."""
    flop = 2 * batch * m * k * n
    return Work(forward=Pass(flop, 1 + tree(k)), input_gradient=Pass(2 * flop, 1 + max(tree(n), tree(m))))


def convolution(
    *,
    batch: int,
    in_channels: int,
    out_channels: int,
    kernel: tuple[int, ...],
    input_size: tuple[int, ...],
    output_size: tuple[int, ...],
    groups: int = 1,
) -> Work:
    """Direct convolution: every output is a sum over in_channels / groups × kernel products [Ben-Nun 2019, table 4].

    dx costs what y costs (each product of forward is used once in it); the table prints H·W for H'·W', which for a
    stride of 1 is the same. Other algorithms: ``graph/convolution.py``.
    """
    channels = in_channels // groups
    flop = 2 * batch * out_channels * channels * prod(kernel) * prod(output_size)
    return Work(
        forward=Pass(flop, 1 + tree(channels) + sum(map(tree, kernel))),
        weight_gradient=Pass(flop, 1 + tree(batch) + sum(map(tree, output_size))),
        input_gradient=Pass(flop, 1 + tree(out_channels // groups) + sum(map(tree, kernel))),
    )


def attention(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    value_dim: int,
    causal: bool = False,
    window: int = 0,
) -> Work:
    """Fused softmax(q kᵀ) v, scores never stored, hence computed again in backward [Dao et al. 2022].

    Counted in full, masked pairs included: ``attended_pairs`` says which part a causal kernel does.
    Forward 2 products and a softmax of 5 operations a score; input gradient 4 products and 4 operations a score.
    """
    pairs = batch * heads * queries * keys
    scores, values = 2 * pairs * head_dim, 2 * pairs * value_dim
    # scale, exp, subtract, and two reductions of keys each: 5 operations a pair.
    return Work(
        forward=Pass(scores + values + 5 * pairs, 1 + tree(head_dim) + softmax_depth(keys) + 1 + tree(keys)),
        input_gradient=Pass(
            2 * scores + 2 * values + 4 * pairs,
            2 + tree(value_dim) + 2 + tree(keys) + max(tree(queries), tree(keys)),
        ),
        recomputed=Pass(scores, 1 + tree(head_dim)),
    )


def attended_pairs(*, queries: int, keys: int, causal: bool = False, window: int = 0) -> int:
    """Pairs of query and key that a mask leaves: query i (aligned to the last key) sees itself and what came before.

    ``window`` above 0 limits a query to that many keys, itself included. Without a mask all ``queries · keys``.
    """
    if not causal and not window:
        return queries * keys
    reach = window or keys
    if not causal:
        return sum(min(keys, i + reach) - max(0, i - reach + 1) for i in range(queries))
    first = keys - queries  # keys before the first query
    seen = min(max(reach - first - 1, 0), queries)  # queries that still see everything before them
    return seen * (first + 1) + seen * (seen - 1) // 2 + (queries - seen) * min(reach, keys)


def embedding(*, rows: int, features: int) -> Work:
    """A lookup costs nothing; its gradient adds rows that met the same entry, at worst all of them."""
    return Work(forward=Pass(0, 1), weight_gradient=Pass(rows * features, tree(rows)))


def layer_norm(*, rows: int, features: int) -> Work:
    """Mean, variance, normalise, scale and shift: 8 operations an element, two trees in a row over the features.

    Backward: two sums over features for dx (9 operations an element), sums over rows for the scale and shift (4).
    """
    elements = rows * features
    return Work(
        forward=Pass(8 * elements, 2 * tree(features) + 6),
        weight_gradient=Pass(4 * elements, 1 + tree(rows)),
        input_gradient=Pass(9 * elements, tree(features) + 5),
    )


def rms_norm(*, rows: int, features: int) -> Work:
    """Without mean and shift: 4 operations an element, one tree [Zhang and Sennrich 2019]."""
    elements = rows * features
    return Work(
        forward=Pass(4 * elements, tree(features) + 4),
        weight_gradient=Pass(3 * elements, 1 + tree(rows)),
        input_gradient=Pass(6 * elements, tree(features) + 4),
    )


def batch_norm(*, elements: int, channels: int) -> Work:
    """Statistics over batch and positions: the tree spans elements / channels numbers.

    [Ben-Nun 2019 gives depth log N; where height and width are reduced too, as frameworks do, it is log N·H·W.]
    """
    reduced = elements // max(channels, 1)
    return Work(
        forward=Pass(8 * elements, 2 * tree(reduced) + 6),
        weight_gradient=Pass(4 * elements, 1 + tree(reduced)),
        input_gradient=Pass(9 * elements, tree(reduced) + 5),
    )


def activation(*, elements: int, function: str = "relu") -> Work:
    """1 operation an element each way, whatever the function [Ben-Nun 2019, table 4]."""
    return Work(forward=Pass(elements, 1), input_gradient=Pass(elements, 1))


def elementwise(*, elements: int, operations: int = 1, gradients: int = 1) -> Work:
    """``operations`` in a row on each element (add, multiply, rotate); ``gradients`` of them an element in backward."""
    return Work(
        forward=Pass(operations * elements, operations), input_gradient=Pass(gradients * elements, int(gradients > 0))
    )


def dropout(*, elements: int) -> Work:
    """Draw, compare, scale; backward scales."""
    return Work(forward=Pass(3 * elements, 3), input_gradient=Pass(elements, 1))


def pooling(*, elements: int, window: tuple[int, ...], operation: str = "max") -> Work:
    """``elements`` outputs, each of a window [Ben-Nun 2019, table 4, with the window's size as its constant]."""
    size = prod(window)
    spread = 1 if operation == "max" else size  # the gradient goes to one input, or to all of them
    return Work(
        forward=Pass(elements * size, sum(map(tree, window))),
        input_gradient=Pass(elements * spread, 1),
    )


def reduction(*, elements: int, outputs: int = 1) -> Work:
    """Sums of elements / outputs numbers; the gradient is a copy."""
    return Work(
        forward=Pass(elements, tree(elements // max(outputs, 1))),
        input_gradient=Pass(elements, 1),
    )


def softmax_depth(size: int) -> int:
    """Maximum, subtract, exp, sum, divide."""
    return 2 * tree(size) + 3


def softmax(*, rows: int, size: int) -> Work:
    """5 operations an element; backward multiplies, sums, subtracts, multiplies."""
    elements = rows * size
    return Work(forward=Pass(5 * elements, softmax_depth(size)), input_gradient=Pass(4 * elements, tree(size) + 3))


def cross_entropy(*, rows: int, classes: int) -> Work:
    """Log-softmax (6 operations an element), the target's entry, the mean over rows; backward exp and subtract."""
    elements = rows * classes
    return Work(
        forward=Pass(6 * elements + 2 * rows, softmax_depth(classes) + 1 + tree(rows)),
        input_gradient=Pass(2 * elements, 2),
    )


GATES: Mapping[str, int] = MappingProxyType({"rnn": 1, "gru": 3, "lstm": 4})
_CELL_OPERATIONS: Mapping[str, int] = MappingProxyType({"rnn": 2, "gru": 12, "lstm": 13})


def recurrent(
    *, cell: str, batch: int, steps: int, input_size: int, hidden_size: int, projection_size: int = 0
) -> Work:
    """One direction of one layer: steps × gates × hidden × (input + hidden) products, and time is a chain.

    A step waits for the one before: the depth grows with ``steps``, so more of them add no parallelism. The products
    with the inputs do not wait, and count once in the depth. ``projection_size``: LSTM with a projected output.
    """
    state = projection_size or hidden_size
    gates = GATES[cell]
    products = 2 * batch * steps * gates * hidden_size * (input_size + state)
    projection = 2 * batch * steps * hidden_size * projection_size
    cell_flop = _CELL_OPERATIONS[cell] * batch * steps * hidden_size
    # In a cell at most: add, gate, multiply, add, tanh, multiply.
    chain = 1 + tree(state) + 6 + (1 + tree(hidden_size) if projection_size else 0)
    back = 1 + tree(gates * hidden_size) + 6 + (1 + tree(projection_size) if projection_size else 0)
    return Work(
        forward=Pass(products + projection + cell_flop, 1 + tree(input_size) + steps * chain),
        weight_gradient=Pass(products + projection, 1 + tree(batch * steps)),
        input_gradient=Pass(products + projection + cell_flop, steps * back + 1 + tree(gates * hidden_size)),
    )


def experts(
    *, tokens: int, num_experts: int, experts_per_token: int, in_features: int, hidden_features: int, gated: bool = True
) -> Work:
    """Each token through ``experts_per_token`` of ``num_experts`` two-layer networks, and their weighted sum."""
    rows = tokens * experts_per_token
    products = 2 * rows * in_features * hidden_features * (3 if gated else 2)
    between = rows * hidden_features * (2 if gated else 1)
    combine = 2 * rows * in_features
    depth = 2 + tree(in_features) + 1 + 1 + tree(hidden_features) + tree(experts_per_token) + 1
    return Work(
        forward=Pass(products + between + combine, depth),
        weight_gradient=Pass(products, 1 + tree(max(rows // num_experts, 1))),
        input_gradient=Pass(products + 2 * between + combine, depth),
    )


def selection(*, rows: int, size: int) -> Work:
    """The largest few of ``size`` (a router's choice), as a sort: size · log size comparisons."""
    return Work(forward=Pass(rows * size * max(tree(size), 1), max(tree(size), 1)))


def scan(*, batch: int, steps: int, channels: int, state_size: int) -> Work:
    """Selective state space: h ← a h + b x, y = c h, every step after the one before [Gu and Dao 2023].

    A parallel scan has depth log(steps); the sequential form counted here does the fewest operations.
    """
    elements = batch * steps * channels * state_size
    return Work(forward=Pass(9 * elements, tree(steps) + 4), input_gradient=Pass(18 * elements, tree(steps) + 4))


def movement(*, elements: int) -> Work:
    """A copy: concatenation, padding, a rearrangement that cannot be a view. Bytes, no FLOP."""
    return Work(forward=Pass(0, 1), input_gradient=Pass(0, 1))


KINDS: Mapping[str, Callable[..., Work]] = MappingProxyType(
    {
        "linear": linear,
        "matmul": matmul,
        "convolution": convolution,
        "attention": attention,
        "experts": experts,
        "recurrent": recurrent,
        "embedding": embedding,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "batch_norm": batch_norm,
        "activation": activation,
        "elementwise": elementwise,
        "dropout": dropout,
        "pooling": pooling,
        "reduction": reduction,
        "softmax": softmax,
        "cross_entropy": cross_entropy,
        "selection": selection,
        "scan": scan,
        "movement": movement,
    }
)
"""Operator kind → its work. A new kind is a function above and a line here."""

MATRIX_KINDS = frozenset({"linear", "matmul", "convolution", "attention", "experts", "recurrent"})
"""Kinds whose products of matrices are the FLOP that MFU counts."""


def matrix_work(kind: str, attributes: Mapping[str, Any]) -> Work:
    """Only the products of matrices of an operator: no softmax, no gates, no combining. Depths are the whole kind's."""
    whole = KINDS[kind](**attributes)
    if kind not in MATRIX_KINDS:
        return Work()
    if kind == "attention":
        pairs = prod(attributes[key] for key in ("batch", "heads", "queries", "keys"))
        return _without(whole, 5 * pairs, 4 * pairs)
    if kind == "experts":
        rows = attributes["tokens"] * attributes["experts_per_token"]
        between = rows * attributes["hidden_features"] * (2 if attributes.get("gated", True) else 1)
        combine = 2 * rows * attributes["in_features"]
        return _without(whole, between + combine, 2 * between + combine)
    if kind == "recurrent":
        extra = _CELL_OPERATIONS[attributes["cell"]] * prod(attributes[k] for k in ("batch", "steps", "hidden_size"))
        return _without(whole, extra, extra)
    return whole


def _without(work: Work, forward: int, input_gradient: int) -> Work:
    return replace(
        work,
        forward=Pass(work.forward.flop - forward, work.forward.depth),
        input_gradient=Pass(work.input_gradient.flop - input_gradient, work.input_gradient.depth),
    )

"""Time of a collective over one kind of link: one function per algorithm, each the formula of its source.

``nbytes`` is what a rank has (all-reduce, reduce-scatter, broadcast) or gets (all-gather): the whole message. Numbers
or numpy arrays. Alpha-beta model: a message of n bytes takes alpha + n beta; links are full duplex; additions are free.

    all-reduce = reduce-scatter + all-gather
    ring            few bytes in flight at a time: best for long messages     alpha grows with p
    butterfly       recursive doubling: best for short messages               beta grows with log p
    Rabenseifner    recursive halving, then doubling: both good, p a power of 2
    tree            reduce, then broadcast
    hierarchical    inside each node, then between nodes, then inside again

Sources: [Ben-Nun 2019, section 2.5], [Thakur 2005, sections 4.1 to 4.4], [Rabenseifner 2004]. Ring,
butterfly and Rabenseifner are held to a round-by-round simulation in tests/unit/cost/test_collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from meshwise.units import Bytes, Seconds


class Link(Protocol):
    """What the formulas need of a link (``hardware.Link`` has it): start-up seconds, and seconds per byte."""

    @property
    def alpha(self) -> Seconds: ...

    @property
    def beta(self) -> float: ...


def send_time(nbytes: Bytes, link: Link) -> Seconds:
    """One message: ``alpha + n beta``."""
    return link.alpha + nbytes * link.beta


def ring_reduce_scatter_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Time to sum ``nbytes`` over all ranks and leave one p-th of the sum on each.

    ``(p-1) alpha + (p-1)/p n beta``, leaving out the additions  [Thakur 2005, section 4.3].
    """
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * nbytes * link.beta


def ring_all_gather_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Time until every rank has all ``nbytes``, of which each had one p-th: as the reduce-scatter, backwards."""
    return ring_reduce_scatter_time(nbytes, ranks, link)


def ring_all_reduce_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """``2(p-1) alpha + 2(p-1)/p n beta``  [Patarasuk and Yuan 2009]."""
    return ring_reduce_scatter_time(nbytes, ranks, link) + ring_all_gather_time(nbytes, ranks, link)


def butterfly_all_reduce_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """``⌈log2 p⌉ (alpha + n beta)``: whole messages swapped at distances 1, 2, 4 …  [Thakur 2005, section 4.4]."""
    return _rounds(ranks) * send_time(nbytes, link)


def rabenseifner_reduce_scatter_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Recursive halving: ``⌈log2 p⌉ alpha + (p-1)/p n beta``  [Thakur 2005, section 4.3]."""
    return _rounds(ranks) * link.alpha + (ranks - 1) / ranks * nbytes * link.beta


def rabenseifner_all_reduce_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """``2 ⌈log2 p⌉ alpha + 2(p-1)/p n beta``  [Rabenseifner 2004]."""
    return 2 * rabenseifner_reduce_scatter_time(nbytes, ranks, link)


def tree_broadcast_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """``⌈log2 p⌉ (alpha + n beta)``: a binomial tree; the reduction is the same, backwards."""
    return _rounds(ranks) * send_time(nbytes, link)


def tree_all_reduce_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Reduce, then broadcast: ``2 ⌈log2 p⌉ (alpha + n beta)``  [Ben-Nun 2019, section 2.5]."""
    return 2 * tree_broadcast_time(nbytes, ranks, link)


def pipelined_tree_all_reduce_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Two complementary binary trees, cut into many small pieces: ``2 ⌈log2 p⌉ alpha + 2 n beta``  [Sanders 2009].

    Leaves out the fill of the pipeline, which is small for long messages.
    """
    return 2 * _rounds(ranks) * link.alpha + 2 * nbytes * link.beta * (ranks > 1)


def all_to_all_time(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """Every rank sends one p-th of its ``nbytes`` to each: ``(p-1) alpha + (p-1)/p n beta``  [Thakur 2005, 4.2]."""
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * nbytes * link.beta


def parameter_server_time(nbytes: Bytes, ranks: int, link: Link, *, num_servers: int = 1) -> Seconds:
    """Gradients to and parameters from ``num_servers``, each holding its share: ``2 (alpha + p n beta / s)``.

    In-cast and out-cast are serialised at a server's link; with as many servers as ranks the bandwidth is a ring's.
    """
    return 2 * (link.alpha + ranks * nbytes * link.beta / num_servers) * (ranks > 1)


def hierarchical_all_reduce_time(
    nbytes: Bytes, *, ranks_per_node: int, num_nodes: int, inside: Link, between: Link
) -> Seconds:
    """Reduce-scatter inside every node, all-reduce of each part between nodes, all-gather inside.

    ``between`` is one rank's share of the node's network: all ranks of a node use it at once.
    """
    part = nbytes / ranks_per_node
    return (
        ring_reduce_scatter_time(nbytes, ranks_per_node, inside)
        + ring_all_reduce_time(part, num_nodes, between)
        + ring_all_gather_time(nbytes, ranks_per_node, inside)
    )


def all_reduce_bound(nbytes: Bytes, ranks: int, link: Link) -> Seconds:
    """No algorithm is faster: ``⌈log2 p⌉ alpha`` for everyone to hear of everyone, ``2(p-1)/p n beta`` to carry it.

    The bandwidth term holds where no sum is computed twice; with it, (p-1)/p n beta  [Ben-Nun 2019, section 2.5].
    """
    return _rounds(ranks) * link.alpha + 2 * (ranks - 1) / ranks * nbytes * link.beta


def butterfly_limit(ranks: int, link: Link) -> Bytes:
    """Message length below which a butterfly beats Rabenseifner's all-reduce.

    ``log p alpha / (beta (log p - 2(p-1)/p))``; infinite for two ranks, where the butterfly always wins.
    """
    rounds = _rounds(ranks)
    gain = rounds - 2 * (ranks - 1) / ranks
    return math.inf if gain <= 0 else rounds * link.alpha / (link.beta * gain)


ALL_REDUCE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ring": ring_all_reduce_time,
        "butterfly": butterfly_all_reduce_time,
        "rabenseifner": rabenseifner_all_reduce_time,
        "tree": tree_all_reduce_time,
        "pipelined-tree": pipelined_tree_all_reduce_time,
    }
)
"""Flat algorithms for an all-reduce by name."""


def _rounds(ranks: Any) -> Any:
    """⌈log2 p⌉, for numbers and for arrays."""
    if isinstance(ranks, int):
        return (ranks - 1).bit_length()
    import numpy as np

    return np.ceil(np.log2(ranks))

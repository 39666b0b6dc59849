"""The formulas, against simulations that send real messages round by round, and against published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cost import collectives as c


@dataclass(frozen=True)
class Wire:
    alpha: float
    beta: float


WIRE = Wire(alpha=5e-6, beta=1 / 12.5e9)  # 5 µs, 12.5 GB/s: the oracle's figures
GIGABYTE = 1e9


class Machine:
    """Ranks with a vector each. A round of messages lasts as long as its longest; every rank sends one and gets one."""

    def __init__(self, ranks: int, length: int) -> None:
        self.data = [np.random.default_rng(rank).random(length) for rank in range(ranks)]
        self.total = sum(self.data)
        self.time = 0.0

    def round(
        self, messages: list[tuple[int, int, slice]], combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> None:
        arriving = [(target, part, self.data[source][part].copy()) for source, target, part in messages]
        for target, part, values in arriving:
            self.data[target][part] = combine(self.data[target][part], values)
        self.time += max(WIRE.alpha + values.nbytes * WIRE.beta for _, _, values in arriving)


def add(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return mine + theirs


def replace(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return theirs


def ring(machine: Machine, ranks: int, length: int) -> None:
    block = length // ranks
    parts = [slice(i * block, (i + 1) * block) for i in range(ranks)]
    for step in range(ranks - 1):
        machine.round([(r, (r + 1) % ranks, parts[(r - step) % ranks]) for r in range(ranks)], add)
    for step in range(ranks - 1):
        machine.round([(r, (r + 1) % ranks, parts[(r + 1 - step) % ranks]) for r in range(ranks)], replace)


def butterfly(machine: Machine, ranks: int, length: int) -> None:
    distance = 1
    while distance < ranks:
        machine.round([(r, r ^ distance, slice(0, length)) for r in range(ranks)], add)
        distance *= 2


def rabenseifner(machine: Machine, ranks: int, length: int) -> None:
    low, high = [0] * ranks, [length] * ranks
    distances = []
    distance = ranks // 2
    while distance:
        messages = []
        for r in range(ranks):
            middle = (low[r] + high[r]) // 2
            mine_is_low = not r & distance
            messages.append((r, r ^ distance, slice(middle, high[r]) if mine_is_low else slice(low[r], middle)))
            low[r], high[r] = (low[r], middle) if mine_is_low else (middle, high[r])
        machine.round(messages, add)
        distances.append(distance)
        distance //= 2
    for distance in reversed(distances):
        machine.round([(r, r ^ distance, slice(low[r], high[r])) for r in range(ranks)], replace)
        spans = [(min(low[r], low[r ^ distance]), max(high[r], high[r ^ distance])) for r in range(ranks)]
        low, high = [s[0] for s in spans], [s[1] for s in spans]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("simulate", "formula"),
    [
        (ring, c.ring_all_reduce_time),
        (butterfly, c.butterfly_all_reduce_time),
        (rabenseifner, c.rabenseifner_all_reduce_time),
    ],
)
def test_the_formula_is_the_time_of_an_algorithm_that_sums(simulate, formula, ranks: int) -> None:
    length = 16 * 64
    machine = Machine(ranks, length)
    simulate(machine, ranks, length)
    for data in machine.data:
        np.testing.assert_allclose(data, machine.total)
    assert machine.time == pytest.approx(formula(8 * length, ranks, WIRE))


def test_published_oracles_for_eight_ranks_and_a_gigabyte() -> None:
    assert c.ring_all_reduce_time(GIGABYTE, 8, WIRE) == pytest.approx(0.14007)
    assert c.rabenseifner_all_reduce_time(GIGABYTE, 8, WIRE) == pytest.approx(0.14003)
    assert c.butterfly_all_reduce_time(GIGABYTE, 8, WIRE) == pytest.approx(0.240015)
    assert c.tree_all_reduce_time(GIGABYTE, 8, WIRE) == pytest.approx(0.48003)
    assert c.butterfly_limit(64, WIRE) == pytest.approx(93_023, abs=1)


@pytest.mark.parametrize("name", c.ALL_REDUCE)
def test_one_rank_talks_to_nobody(name: str) -> None:
    assert c.ALL_REDUCE[name](GIGABYTE, 1, WIRE) == 0
    assert c.parameter_server_time(GIGABYTE, 1, WIRE) == 0
    assert c.all_to_all_time(GIGABYTE, 1, WIRE) == 0


@given(
    ranks=st.integers(2, 4096),
    nbytes=st.floats(0, 1e12),
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e-13, 1e-8),
)
def test_no_algorithm_beats_the_bound(ranks: int, nbytes: float, alpha: float, beta: float) -> None:
    wire = Wire(alpha, beta)
    bound = c.all_reduce_bound(nbytes, ranks, wire)
    for time in c.ALL_REDUCE.values():
        # A butterfly adds everything twice over: without that its bandwidth term may be half the bound's.
        assert time(nbytes, ranks, wire) >= bound * (0.5 if time is c.butterfly_all_reduce_time else 1 - 1e-12)


@given(ranks=st.integers(2, 512), nbytes=st.floats(1, 1e12), scale=st.floats(0.1, 10), stretch=st.floats(0.1, 10))
def test_time_times_k_and_data_times_j_rescale(ranks: int, nbytes: float, scale: float, stretch: float) -> None:
    slower = Wire(WIRE.alpha * scale, WIRE.beta * scale)
    same_bits = Wire(WIRE.alpha, WIRE.beta / stretch)
    for time in c.ALL_REDUCE.values():
        assert time(nbytes, ranks, slower) == pytest.approx(scale * time(nbytes, ranks, WIRE))
        assert time(nbytes * stretch, ranks, same_bits) == pytest.approx(time(nbytes, ranks, WIRE))


def test_butterflies_are_for_short_messages() -> None:
    limit = c.butterfly_limit(64, WIRE)
    for nbytes, faster in ((limit / 2, True), (limit * 2, False)):
        assert (
            c.butterfly_all_reduce_time(nbytes, 64, WIRE) < c.rabenseifner_all_reduce_time(nbytes, 64, WIRE)
        ) is faster
    assert c.butterfly_limit(2, WIRE) == math.inf


def test_as_many_servers_as_ranks_carry_what_a_ring_carries() -> None:
    long = 100 * GIGABYTE
    servers = c.parameter_server_time(long, 64, WIRE, num_servers=64)
    assert servers == pytest.approx(c.ring_all_reduce_time(long, 64, WIRE), rel=0.02)
    assert c.parameter_server_time(long, 64, WIRE) > 60 * servers


def test_one_node_or_one_rank_a_node_is_a_flat_ring() -> None:
    fast = Wire(1e-6, 1 / 300e9)
    sizes = {"inside": fast, "between": WIRE}
    one_node = c.hierarchical_all_reduce_time(GIGABYTE, ranks_per_node=8, num_nodes=1, **sizes)
    assert one_node == pytest.approx(c.ring_all_reduce_time(GIGABYTE, 8, fast))
    lonely = c.hierarchical_all_reduce_time(GIGABYTE, ranks_per_node=1, num_nodes=8, **sizes)
    assert lonely == pytest.approx(c.ring_all_reduce_time(GIGABYTE, 8, WIRE))


def test_arrays_are_priced_as_numbers_are() -> None:
    ranks, sizes = np.array([1, 2, 8, 512]), np.array([0.0, 1e3, 1e6, 1e9])
    for time in c.ALL_REDUCE.values():
        expected = [time(float(n), int(p), WIRE) for n, p in zip(sizes, ranks)]
        np.testing.assert_allclose(time(sizes, ranks, WIRE), expected)

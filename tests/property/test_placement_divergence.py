"""KL divergence of key-stage load: bounds, spread against clumped, the paper's gradient as an oracle."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.controller.maths import divergence

capacities = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@given(capacities, st.data())
def test_kl_is_not_negative_and_zero_for_the_capacity_share(capacity: list[int], data: st.DataObject) -> None:
    load = data.draw(st.lists(st.integers(0, 9), min_size=len(capacity), max_size=len(capacity)))
    assert divergence.kl(load, capacity) >= 0
    assert divergence.kl([3 * c for c in capacity], capacity) == pytest.approx(0, abs=1e-12)


@given(st.integers(2, 12), st.integers(2, 12))
def test_spread_is_below_clumped(nodes: int, units: int) -> None:
    each, more = divmod(units, nodes)
    spread = [each + (j < more) for j in range(nodes)]
    clumped = [units] + [0] * (nodes - 1)
    half = [units - 1, 1] + [0] * (nodes - 2)
    even = [1] * nodes
    assert divergence.kl(spread, even) < divergence.kl(clumped, even)
    assert divergence.kl(spread, even) <= divergence.kl(half, even) <= divergence.kl(clumped, even)
    assert divergence.kl(spread, even) == pytest.approx(
        divergence.least_kl({1: units}, {1: nodes}), abs=1e-12
    )


@given(st.integers(1, 6), st.integers(1, 7))
def test_least_kl_is_the_least_of_all_allocations_on_equal_nodes(nodes: int, units: int) -> None:
    every = [c for c in itertools.product(range(units + 1), repeat=nodes) if sum(c) == units]
    least = min(divergence.kl(c, [1] * nodes) for c in every)
    assert divergence.least_kl({1: units}, {1: nodes}) == pytest.approx(least, abs=1e-9)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_least_kl_of_replicas_of_one_size_on_unequal_nodes(
    capacity: list[int], size: int, count: int
) -> None:
    """Against every allocation that the nodes hold; where they do not hold all, never above the best."""
    wide = [c if c >= size or max(capacity) < size else 0 for c in capacity]
    every = [c for c in itertools.product(range(count + 1), repeat=len(capacity)) if sum(c) == count]
    held = [c for c in every if all(n * size <= room for n, room in zip(c, capacity, strict=True))]
    ours = divergence.least_kl({size: count}, Counter(capacity))
    if held:
        least = min(divergence.kl([n * size for n in c], capacity) for c in held)
        assert ours == pytest.approx(least, abs=1e-9)
    else:
        on_wide = [c for c in every if all(not n or room for n, room in zip(c, wide, strict=True))]
        costs = [divergence.kl([n * size for n in c], capacity) for c in on_wide]
        assert min(costs) - 1e-9 <= ours <= max(costs) + 1e-9


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.dictionaries(st.integers(1, 3), st.integers(0, 2)),
)
def test_least_kl_of_mixed_sizes_can_be_reached(capacity: list[int], replicas: dict[int, int]) -> None:
    sizes = [size for size, count in replicas.items() for _ in range(count)]
    ours = divergence.least_kl(replicas, Counter(capacity))
    loads = []
    for where in itertools.product(range(len(capacity)), repeat=len(sizes)):
        load = [0] * len(capacity)
        for j, size in zip(where, sizes, strict=True):
            load[j] += size
        loads.append(divergence.kl(load, capacity))
    assert any(ours == pytest.approx(kl, abs=1e-9) for kl in loads)


def test_least_kl_of_large_replicas_and_unequal_nodes() -> None:
    assert divergence.least_kl({4: 1}, {4: 4}) == pytest.approx(math.log(4))  # it fills one of four nodes
    assert divergence.kl([4, 0, 0, 0], [4] * 4) == pytest.approx(math.log(4))
    assert divergence.least_kl({1: 2}, {8: 1, 1: 2}) == pytest.approx(math.log(1 / 0.8))
    assert divergence.kl([1, 1, 0], [8, 1, 1]) > divergence.least_kl({1: 2}, {8: 1, 1: 2}) + 0.3
    assert divergence.least_kl({}, {4: 2}) == divergence.least_kl({1: 3}, {}) == 0.0


def test_the_papers_divergence_cannot_tell_spread_from_clumped() -> None:
    """Eq. 8 with one row per replica and Q uniform: log M for every integral placement (erratum)."""

    def printed(rows: list[int], nodes: int) -> float:
        """sum_i D(P_i || Q): row i of P is the node that replica i is on, Q is uniform."""
        p = np.zeros((len(rows), nodes))
        p[np.arange(len(rows)), rows] = 1.0
        ratio = np.where(p > 0, p, 1.0) / (1 / nodes)
        return float(np.sum(p * np.log(ratio)))

    spread, clumped = [0, 1, 2, 3], [0, 0, 0, 0]
    assert printed(spread, 4) == printed(clumped, 4) == pytest.approx(4 * math.log(4))
    loads = [[rows.count(j) for j in range(4)] for rows in (spread, clumped)]
    assert divergence.kl(loads[0], [1] * 4) == pytest.approx(0)
    assert divergence.kl(loads[1], [1] * 4) == pytest.approx(math.log(4))


def test_the_papers_descent_leaves_the_simplex_and_ours_does_not() -> None:
    """Eq. 9-10: the fixed point is Q / e, which sums to 1 / e; projected it is Q (erratum)."""
    share = np.array([0.5, 0.3, 0.2])
    point = np.full(3, 1 / 3)
    for _ in range(5000):
        point = point - 0.01 * (1 + np.log(point / share))
    assert point == pytest.approx(share / math.e, rel=1e-6)
    assert divergence.descend(share, 0.01, 5000) == pytest.approx(share, rel=1e-6)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_greedy_tends_to_what_the_projected_gradient_finds(capacity: list[int]) -> None:
    share = np.array(capacity) / sum(capacity)
    units = 40 * sum(capacity)
    order = divergence.fill([0] * len(share), list(share), [0.0] * len(share), [units] * len(share), units)
    found = np.bincount(order, minlength=len(share)) / units
    oracle = divergence.descend(share, 0.02, 3000)
    assert np.abs(found - oracle).max() < 0.02


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_projection_is_the_nearest_point_of_the_simplex(values: list[float]) -> None:
    point = np.array(values)
    near = divergence.project(point)
    assert near.min() >= 0
    assert near.sum() == pytest.approx(1)
    for j in range(len(point)):  # no corner of the simplex is in a direction that comes nearer
        corner = np.eye(len(point))[j]
        assert (point - near) @ (corner - near) <= 1e-9

"""QUART Eq. 8, 9 and 10 as printed: an objective that cannot tell, and a descent that leaves the simplex."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from keystage.controller.maths.divergence import descend, fill, kl, project

NODES = 4


def printed_objective(placement: tuple[int, ...]) -> float:
    """Eq. 8 summed over instances: P_i is the node instance i is on, Q_i is uniform over M nodes."""
    total = 0.0
    for node in placement:
        p = [1.0 if j == node else 0.0 for j in range(NODES)]
        total += sum(x * math.log(x / (1 / NODES)) for x in p if x > 0)
    return total


def test_equation_8_is_the_same_for_every_placement() -> None:
    values = {round(printed_objective(p), 12) for p in itertools.product(range(NODES), repeat=4)}
    assert values == {round(4 * math.log(NODES), 12)}


def test_our_divergence_of_the_load_per_node_tells_spread_from_clumped() -> None:
    even = [1 / NODES] * NODES
    spread, paired, clumped = kl([1, 1, 1, 1], even), kl([2, 2, 0, 0], even), kl([4, 0, 0, 0], even)
    assert spread == pytest.approx(0.0, abs=1e-12)
    assert paired == pytest.approx(math.log(2))
    assert clumped == pytest.approx(math.log(NODES))
    assert sorted(fill([0] * NODES, even, [0.0] * NODES, [4] * NODES, 4)) == [0, 1, 2, 3]


def test_equations_9_and_10_leave_the_simplex() -> None:
    """P <- P - a (1 + log(P / Q)) stands still at P = Q / e, whose rows add up to 1 / e."""
    q = np.full(NODES, 1 / NODES)
    p = np.array([0.7, 0.1, 0.1, 0.1])
    first = p - 0.01 * (1 + np.log(p / q))
    assert first.sum() != pytest.approx(1.0, abs=1e-3)
    for _ in range(5000):
        p = p - 0.01 * (1 + np.log(p / q))
    assert p == pytest.approx(q / math.e, rel=1e-6)
    assert p.sum() == pytest.approx(1 / math.e)


def test_our_descent_stays_on_the_simplex_and_finds_the_capacity_share() -> None:
    q = np.array([0.4, 0.3, 0.2, 0.1])
    p = np.array([0.7, 0.1, 0.1, 0.1])
    stepped = project(p - 0.01 * (1 + np.log(p / q)))
    assert stepped.sum() == pytest.approx(1.0)
    assert stepped.min() >= 0
    assert descend(q, 0.01, 5000) == pytest.approx(q, abs=1e-6)

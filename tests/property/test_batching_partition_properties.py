"""Sub-cluster partition: small cases equal brute force, bounds always hold, errors are true."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.batching.partition import partition
from keystage.batching.partition_problem import (
    Bounds,
    Division,
    PartitionError,
    Problem,
    SharedModel,
    objective,
    violations,
)

_AMOUNT = st.integers(1, 20).map(float)


@st.composite
def _problems(draw: st.DrawFn, most: int = 6) -> Problem:
    clusters = draw(st.integers(1, 3))
    count = draw(st.integers(1, most))
    models = [
        SharedModel(f"m{i}", draw(_AMOUNT), draw(_AMOUNT), draw(st.integers(0, 10))) for i in range(count)
    ]
    rate, static = sum(m.rate_rps for m in models), sum(m.static_bytes for m in models)
    current = draw(st.none() | st.lists(st.integers(-1, clusters - 1), min_size=count, max_size=count))
    bounds = Bounds(
        clusters,
        rate_rps=draw(st.sampled_from([math.inf, 1.1 * rate / clusters, 1.5 * rate / clusters])),
        memory_bytes=draw(st.sampled_from([math.inf, 1.2 * static / clusters + 5, static + 11])),
        disruption=draw(st.sampled_from([math.inf, 2.0, 5.0])) if current is not None else math.inf,
    )
    costs = draw(
        st.none()
        | st.lists(
            st.lists(st.integers(0, 3).map(float), min_size=clusters, max_size=clusters),
            min_size=count,
            max_size=count,
        )
    )
    return Problem(
        models, bounds, weight=draw(st.sampled_from([0.0, 0.5, 1.0])), current=current, costs=costs
    )


def _best(problem: Problem) -> float | None:
    every = itertools.product(range(problem.bounds.sub_clusters), repeat=len(problem.models))
    return min((objective(problem, a) for a in every if not violations(problem, a)), default=None)


def _tried(problem: Problem, limit_s: float = 10.0) -> Division | PartitionError:
    """The division, or why there is none."""
    try:
        return partition(problem, time.monotonic, limit_s=limit_s)
    except PartitionError as error:
        return error


@settings(deadline=None, max_examples=60)
@given(_problems())
def test_small_cases_equal_brute_force(problem: Problem) -> None:
    best, answer = _best(problem), _tried(problem)
    if isinstance(answer, PartitionError):
        assert best is None
        assert answer.is_proven
        assert answer.excess > 0
        return
    assert best is not None
    assert violations(problem, answer.assigned) == {}
    assert abs(answer.objective - best) <= 1e-5 * (1 + best)
    assert answer.bound <= best + 1e-5 * (1 + best)
    assert answer.status in ("optimal", "gap")


@settings(deadline=None, max_examples=15)
@given(_problems(most=40), st.integers(0, 3))
def test_bounds_hold_at_any_size_and_any_limit(problem: Problem, tenths: int) -> None:
    answer = _tried(problem, 0.1 * tenths + 0.05)
    if isinstance(answer, PartitionError):
        assert answer.bound in ("rate_rps", "memory_bytes", "disruption")
        return
    assert violations(problem, answer.assigned) == {}
    assert answer.bound <= answer.objective + 1e-9


@settings(deadline=None, max_examples=25)
@given(_problems())
def test_a_disruption_excess_that_was_proven_is_enough(problem: Problem) -> None:
    """A bound raised by the excess that was named makes a division possible."""
    answer = _tried(problem)
    if isinstance(answer, PartitionError) and answer.bound == "disruption":
        bounds = dataclasses.replace(
            problem.bounds, disruption=problem.bounds.disruption + answer.excess * (1 + 1e-9)
        )
        wider = dataclasses.replace(problem, bounds=bounds)
        again = _tried(wider)
        assert isinstance(again, Division)
        assert violations(wider, again.assigned) == {}

"""The search for equal GPU-seconds, against answers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from keystage.bench.paper_equal import EffortSearch, Try


def searched(
    gpu_s: Callable[[float], float],
    target: float,
    evaluations: int = 12,
    latency_s: Callable[[float], float] = lambda effort: 1 / effort,
) -> EffortSearch:
    """Four seeds that differ by one per cent."""
    search = EffortSearch(target, evaluations)
    while (effort := search.next_effort()) is not None:
        seeds = tuple(gpu_s(effort) * (1 + 0.01 * k) for k in (-1.5, -0.5, 0.5, 1.5))
        search.tried.append(Try(effort, seeds, (latency_s(effort),) * 4))
    return search


@pytest.mark.parametrize("target", [400.0, 900.0, 1100.0, 3000.0])
def test_a_smooth_policy_is_brought_within_two_per_cent(target: float) -> None:
    search = searched(lambda effort: 200 + 800 * effort, target)
    assert search.is_equal
    assert abs(search.choice.gpu_s / target - 1) <= 0.02


def test_the_first_try_suffices_when_it_is_equal() -> None:
    search = searched(lambda effort: 1010.0 * effort, 1000.0)
    assert [one.effort for one in search.tried] == [1.0]
    assert search.choice.efforts == (1.0,) * 4


def test_a_ceiling_is_reported_as_not_equal() -> None:
    search = searched(lambda effort: min(900.0, 500 * effort), 1000.0)
    assert not search.is_equal
    assert search.choice.gpu_s == pytest.approx(900.0)


def test_a_stair_is_met_by_two_close_efforts_shared_among_the_seeds() -> None:
    search = searched(lambda effort: 100.0 * math.ceil(4 * effort), 550.0)
    assert search.is_equal
    low, high = sorted(set(search.choice.efforts))
    assert low < high <= 1.1 * low
    assert math.ceil(4 * low) == 5
    assert math.ceil(4 * high) == 6


def test_of_what_is_equal_the_least_latency_is_taken() -> None:
    search = EffortSearch(1000.0, 12)
    search.tried = [Try(0.3, (1000.0, 1000.0), (9.0, 9.0)), Try(1.5, (1010.0, 1010.0), (0.5, 0.5))]
    assert search.choice.efforts == (1.5, 1.5)


def test_a_starved_policy_that_uses_more_with_less_effort_ends_near_its_lowest() -> None:
    search = searched(lambda effort: 1000 * (effort + 0.16 / effort), 600.0)
    assert not search.is_equal
    assert len(search.tried) < 12
    nearest = min(one.mean_gpu_s for one in search.tried)
    assert nearest == pytest.approx(800.0, rel=0.02)  # at 0.4
    assert nearest <= search.choice.gpu_s <= 1.05 * nearest


def test_effort_never_leaves_its_bounds() -> None:
    for target in (1.0, 1e9):
        search = searched(lambda effort: 1000 * effort**0.1, target, 30)
        assert all(0.1 <= one.effort <= 12.0 for one in search.tried)
        assert not search.is_equal

"""Modules of a stream program that requests pass often get the replicas that their visits need."""

from __future__ import annotations

from keystage.controller.policy.shares import MOST_VISITS, visits


def test_visits_are_arrivals_over_those_at_entry() -> None:
    assert visits([4.0], [4.0, 80.0, 4.0]) == [1.0, 20.0, 1.0]


def test_unknown_and_idle_rates_count_as_one() -> None:
    assert visits([None], [None, 80.0]) == [1.0, 1.0]
    assert visits([0.0], [0.0, 3.0]) == [1.0, 1.0]
    assert visits([2.0], [2.0, None, 0.0]) == [1.0, 1.0, 1.0]


def test_a_rate_near_nothing_is_no_ratio() -> None:
    assert visits([1e-9], [1e-9, 50.0]) == [1.0, MOST_VISITS]

"""Backlogs that drain, against small-step integration of the same fluid."""

from __future__ import annotations

import math

import pytest

from keystage.controller.maths.transient import burst_peak, drain, servers_to_drain

CASES = [
    (100.0, 50.0, 10.0, 4, (1.0, 2.0, 2.0)),
    (0.0, 80.0, 10.0, 2, (0.5, 0.8, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0)),
    (40.0, 5.0, 10.0, 1, ()),
    (12.0, 90.0, 7.5, 0, (-1.0, *(0.25 * k for k in range(20)))),
    (0.0, 5.0, 10.0, 1, (4.0,)),
]


def integrated(
    backlog: float, rate: float, mu: float, ready: int, starts_s: tuple[float, ...]
) -> tuple[float, float, float]:
    """Last time with a queue, its peak and its area, in steps of 50 microseconds."""
    step_s, queue, last_s, peak, area = 5e-5, backlog, 0.0, backlog, 0.0
    for i in range(int(40 / step_s)):
        servers = ready + sum(t <= i * step_s for t in starts_s)
        queue = max(0.0, queue + (rate - mu * servers) * step_s)
        area += queue * step_s
        peak = max(peak, queue)
        if queue > 0:
            last_s = (i + 1) * step_s
        elif i * step_s > max((0.0, *starts_s)):
            break
    return last_s, peak, area


@pytest.mark.parametrize("case", CASES)
def test_the_drain_is_that_of_the_fluid(case: tuple[float, float, float, int, tuple[float, ...]]) -> None:
    last_s, peak, area = integrated(*case)
    result = drain(*case)
    assert result.time_s == pytest.approx(last_s, abs=0.01)
    assert result.peak == pytest.approx(peak, abs=0.05)
    assert result.waited_s == pytest.approx(area, rel=0.002, abs=0.01)


def test_too_few_servers_never_drain() -> None:
    result = drain(1.0, 50.0, 10.0, 3, (1.0,))
    assert (result.time_s, result.peak) == (math.inf, math.inf)
    balanced = drain(30.0, 50.0, 10.0, 4, (1.0,))
    assert balanced.time_s == math.inf
    assert balanced.peak == pytest.approx(40.0)
    assert balanced.peak_s == 1.0


@pytest.mark.parametrize("start_s", [0.0, 0.4, 1.5])
def test_the_number_that_drains_in_time_is_the_smallest(start_s: float) -> None:
    for backlog, rate, ready, starts_s in (
        (200.0, 50.0, 2, ()),
        (80.0, 20.0, 4, (0.2, 0.9)),
        (9.0, 0.0, 0, ()),
    ):
        more = servers_to_drain(backlog, rate, 10.0, ready, starts_s, start_s, 2.0, 1000)
        assert drain(backlog, rate, 10.0, ready, (*starts_s, *[start_s] * more)).time_s <= 2.0 + 1e-9
        if more:
            fewer = drain(backlog, rate, 10.0, ready, (*starts_s, *[start_s] * (more - 1)))
            assert fewer.time_s > 2.0


def test_what_is_on_its_way_is_not_asked_for_again() -> None:
    assert servers_to_drain(100.0, 50.0, 10.0, 2, (), 1.0, 3.0, 100) == 10
    assert servers_to_drain(100.0, 50.0, 10.0, 2, (1.0,) * 10, 1.0, 3.0, 100) == 0


def test_dead_time_longer_than_the_target_is_answered_with_the_bound() -> None:
    assert servers_to_drain(100.0, 50.0, 10.0, 2, (), 45.0, 3.0, 17) == 17
    assert servers_to_drain(1e9, 50.0, 10.0, 2, (), 1.0, 3.0, 17) == 17


def test_the_peak_of_a_burst() -> None:
    assert burst_peak(100.0, 2.0, 10.0, 4) == pytest.approx(120.0)
    assert burst_peak(100.0, 2.0, 10.0, 4, backlog=7.0) == pytest.approx(127.0)
    assert burst_peak(30.0, 2.0, 10.0, 4) == 0.0


def test_garbage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"backlog must be finite and >= 0 items, got -1\.0"):
        drain(-1.0, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="arrival rate must be finite"):
        drain(1.0, math.nan, 1.0, 1)
    with pytest.raises(ValueError, match=r"service rate must be finite and > 0 /s, got 0\.0"):
        drain(1.0, 1.0, 0.0, 1)
    with pytest.raises(ValueError, match="ready servers must be >= 0, got -1"):
        drain(1.0, 1.0, 1.0, -1)
    with pytest.raises(ValueError, match="start times must be finite"):
        drain(1.0, 1.0, 1.0, 1, (math.inf,))
    with pytest.raises(
        ValueError, match=r"need start_s >= 0, within_s > 0 and most >= 0, got 1\.0 s, 0\.0 s"
    ):
        servers_to_drain(1.0, 1.0, 1.0, 1, (), 1.0, 0.0, 5)
    with pytest.raises(ValueError, match="a burst must last a finite time"):
        burst_peak(1.0, math.inf, 1.0, 1)

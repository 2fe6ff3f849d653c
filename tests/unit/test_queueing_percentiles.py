"""Percentiles of waits: closed forms, means, inverses and the smallest number of servers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keystage.controller.maths.erlang import ggc_wait_s
from keystage.controller.maths.percentiles import (
    servers_for_percentile,
    wait_percentile_many,
    wait_percentile_s,
    wait_tail,
)


def test_one_server_is_mm1() -> None:
    """P(W > t) = rho exp(-(mu - lambda) t)."""
    assert wait_tail(80.0, 0.01, 1, 1.0, 1.0, 0.1) == pytest.approx(0.8 * math.exp(-2.0))
    assert wait_percentile_s(80.0, 0.01, 1, 1.0, 1.0, 0.99) == pytest.approx(math.log(80.0) / 20)


@pytest.mark.parametrize(("servers", "ca2", "cs2"), [(1, 1.0, 1.0), (4, 16.0, 0.0), (20, 4.0, 2.0)])
def test_the_tail_integrates_to_the_mean(servers: int, ca2: float, cs2: float) -> None:
    rate = servers * 85.0
    mean_s = ggc_wait_s(rate, 0.01, servers, ca2, cs2)
    step_s = mean_s / 500
    at_s = np.arange(0, 200 * mean_s, step_s) + step_s / 2
    area_s = sum(wait_tail(rate, 0.01, servers, ca2, cs2, float(t)) for t in at_s[:40_000]) * step_s
    assert area_s == pytest.approx(mean_s, rel=1e-4)


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99, 0.9999])
def test_the_percentile_inverts_the_tail(probability: float) -> None:
    for servers, rate in ((1, 90.0), (3, 280.0), (12, 1150.0)):
        wait_s = wait_percentile_s(rate, 0.01, servers, 6.0, 0.5, probability)
        assert wait_tail(rate, 0.01, servers, 6.0, 0.5, wait_s) == pytest.approx(1 - probability, rel=1e-9)


def test_who_does_not_wait_has_percentile_zero() -> None:
    assert wait_percentile_s(1.0, 0.01, 8, 1.0, 1.0, 0.99) == 0.0
    assert wait_percentile_s(0.0, 0.01, 1, 1.0, 1.0, 0.5) == 0.0
    assert wait_tail(0.0, 0.01, 1, 1.0, 1.0, 0.5) == 0.0
    assert wait_percentile_s(90.0, 0.01, 1, 0.0, 0.0, 0.99) == 0.0  # clockwork


def test_overload_has_no_finite_percentile() -> None:
    assert wait_percentile_s(100.0, 0.01, 1, 1.0, 1.0, 0.5) == math.inf
    assert wait_tail(100.0, 0.01, 1, 1.0, 1.0, 1e6) == 1.0
    assert wait_percentile_many([100.0, math.nan], 0.01, 1, 1.0, 1.0, 0.5)[0] == math.inf


def test_the_smallest_number_of_servers_for_a_percentile() -> None:
    for rate, wait_s, p in ((50.0, 0.02, 0.99), (900.0, 0.005, 0.9), (3000.0, 0.1, 0.999), (20.0, 0.0, 0.5)):
        servers = servers_for_percentile(rate, 0.01, 8.0, 1.0, wait_s, p, 1000)
        assert wait_tail(rate, 0.01, servers, 8.0, 1.0, wait_s) <= 1 - p
        assert servers == 1 or wait_tail(rate, 0.01, servers - 1, 8.0, 1.0, wait_s) > 1 - p
    assert servers_for_percentile(1e6, 0.01, 8.0, 1.0, 0.1, 0.99, 77) == 77


def test_garbage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"probability must be in \[0, 1\), got 1.0"):
        wait_percentile_s(1.0, 0.01, 1, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"probability must be in \[0, 1\), got -0.1"):
        wait_percentile_many([1.0], 0.01, 1, 1.0, 1.0, -0.1)
    with pytest.raises(ValueError, match="probability"):
        servers_for_percentile(1.0, 0.01, 1.0, 1.0, 0.1, math.nan, 5)
    with pytest.raises(ValueError, match="most servers must be >= 1, got 0"):
        servers_for_percentile(1.0, 0.01, 1.0, 1.0, 0.1, 0.5, 0)
    with pytest.raises(ValueError, match=r"wait must be >= 0 s, got -1\.0"):
        wait_tail(1.0, 0.01, 1, 1.0, 1.0, -1.0)

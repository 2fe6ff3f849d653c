"""Erlang formulas against published values, an independent oracle and the paper's Eq. 1."""

from __future__ import annotations

import math

import pytest
from scipy.special import gammaln, logsumexp

from keystage.controller.maths.erlang import (
    erlang_b,
    erlang_c,
    ggc_wait_s,
    mmc_wait_s,
    servers_for_wait,
)


def oracle_c(servers: int, load: float) -> float:
    """Erlang C from its definition, summed in logarithms."""
    terms = [k * math.log(load) - gammaln(k + 1) for k in range(servers)]
    last = servers * math.log(load) - gammaln(servers + 1) + math.log(servers / (servers - load))
    return math.exp(last - logsumexp([*terms, last]))


@pytest.mark.parametrize(
    ("servers", "load", "blocking"),
    [(1, 1.0, 0.5), (2, 1.0, 0.2), (5, 3.0, 0.1101), (10, 5.0, 0.0184), (20, 12.03, 0.0100), (0, 3.0, 1.0)],
)
def test_erlang_b_matches_published_tables(servers: int, load: float, blocking: float) -> None:
    assert erlang_b(servers, load) == pytest.approx(blocking, abs=1e-4)


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 50, 400])
@pytest.mark.parametrize("utilisation", [0.05, 0.5, 0.8, 0.95, 0.999])
def test_erlang_c_matches_its_definition(servers: int, utilisation: float) -> None:
    load = servers * utilisation
    assert erlang_c(servers, load) == pytest.approx(oracle_c(servers, load), rel=1e-9)


def test_one_server_is_mm1() -> None:
    assert erlang_c(1, 0.8) == pytest.approx(0.8)
    assert mmc_wait_s(80.0, 0.01, 1) == pytest.approx(0.04)  # rho / (mu - lambda)


def test_many_servers_stay_finite() -> None:
    assert 0 < erlang_c(100_000, 99_900.0) < 1
    assert erlang_c(100_000, 10.0) == 0.0


def test_overload_waits_for_ever() -> None:
    assert mmc_wait_s(100.0, 0.01, 1) == math.inf
    assert ggc_wait_s(200.0, 0.01, 1, 0.0, 0.0) == math.inf


def test_ggc_scales_with_variation_and_is_zero_for_clockwork() -> None:
    assert ggc_wait_s(80.0, 0.01, 1, 16.0, 0.0) == pytest.approx(8 * 0.04)
    assert ggc_wait_s(80.0, 0.01, 1, 1.0, 1.0) == pytest.approx(0.04)
    assert ggc_wait_s(80.0, 0.01, 1, 0.0, 0.0) == 0.0


def test_paper_equation_1_is_not_the_mmc_sojourn() -> None:
    """QUART Eq. 1 at c = 1 is P0 lambda / (mu (mu - lambda)) + 1/mu; at full load it stays finite."""
    rate, mu = 99.0, 100.0
    paper_s = (1 - rate / mu) * rate / (mu * (mu - rate)) + 1 / mu
    exact_s = mmc_wait_s(rate, 1 / mu, 1) + 1 / mu
    assert paper_s < 2 / mu
    assert exact_s == pytest.approx(1 / (mu - rate))


def test_smallest_number_of_servers() -> None:
    for rate in (1.0, 50.0, 180.0, 950.0):
        for wait_s in (0.001, 0.02, 0.5):
            servers = servers_for_wait(rate, 0.01, 16.0, 0.5, wait_s, 100)
            assert ggc_wait_s(rate, 0.01, servers, 16.0, 0.5) <= wait_s
            assert servers == 1 or ggc_wait_s(rate, 0.01, servers - 1, 16.0, 0.5) > wait_s


def test_no_number_of_servers_is_enough() -> None:
    assert servers_for_wait(1000.0, 1.0, 1.0, 1.0, 0.1, 20) == 20
    assert servers_for_wait(10.0, 1.0, 1.0, 1.0, 0.0, 11) == 11


@pytest.mark.parametrize("load", [-1.0, math.nan, math.inf])
def test_garbage_is_refused_by_name(load: float) -> None:
    with pytest.raises(ValueError, match="offered load must be finite"):
        erlang_b(1, load)
    with pytest.raises(ValueError, match="servers must be"):
        erlang_c(-1, 1.0)
    with pytest.raises(ValueError, match="target wait"):
        servers_for_wait(1.0, 0.1, 1.0, 1.0, math.nan, 5)
    with pytest.raises(ValueError, match="squared coefficients"):
        ggc_wait_s(1.0, 0.1, 1, -1.0, 0.0)

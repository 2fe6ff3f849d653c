"""Erlang B and C against their definitions in 60-digit decimal arithmetic."""

from __future__ import annotations

import decimal
import math
from fractions import Fraction

import pytest

from keystage.controller.maths.erlang import MANY_SERVERS, erlang_b, erlang_c, servers_for_wait

UTILISATIONS = (0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999)
SERVERS = (1, 2, 3, 5, 10, 31, 100, 316, 998, 999, 1000, 1001, 2048, 3163, 5000, 10_000)
TINY = 1e-290
"""Below this a double holds no 9 digits any more."""


def definition(servers: int, load: float) -> tuple[float, float]:
    """B and C from their sums over a^k / k!, without recursion, logarithms or gamma functions."""
    with decimal.localcontext(decimal.Context(prec=60, Emin=-999_999, Emax=999_999)):
        a, term, total = decimal.Decimal(load), decimal.Decimal(1), decimal.Decimal(0)
        for k in range(1, servers + 1):
            total += term
            term = term * a / k
        waiting = term * servers / (servers - a)
        return float(term / (total + term)), float(waiting / (total + waiting))


@pytest.mark.parametrize("servers", SERVERS)
def test_erlang_is_its_definition_to_nine_digits(servers: int) -> None:
    for utilisation in UTILISATIONS:
        load = servers * utilisation
        blocking, waiting = definition(servers, load)
        assert erlang_b(servers, load) == pytest.approx(blocking, rel=1e-9, abs=TINY)
        assert erlang_c(servers, load) == pytest.approx(waiting, rel=1e-9, abs=TINY)


@pytest.mark.parametrize("utilisation", [0.93, 0.99, 0.9999])
def test_a_hundred_thousand_servers(utilisation: float) -> None:
    load = 100_000 * utilisation
    blocking, waiting = definition(100_000, load)
    assert blocking > TINY
    assert erlang_b(100_000, load) == pytest.approx(blocking, rel=1e-9)
    assert erlang_c(100_000, load) == pytest.approx(waiting, rel=1e-9)


@pytest.mark.parametrize("servers", [MANY_SERVERS, 4096, 50_000])
@pytest.mark.parametrize("utilisation", [1.0, 1.0001, 1.2, 30.0])
def test_blocking_under_overload(servers: int, utilisation: float) -> None:
    load = servers * utilisation
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = load * blocking / (k + load * blocking)
    assert erlang_b(servers, load) == pytest.approx(blocking, rel=1e-12)


def test_small_cases_are_exact_fractions() -> None:
    """C(2, 1) = 1/3, C(3, 2) = 4/9, C(4, 3) = 27/53, from the definition in rationals."""
    for servers, load in ((2, 1), (3, 2), (4, 3)):
        sums = sum(Fraction(load**k, math.factorial(k)) for k in range(servers))
        last = Fraction(load**servers * servers, math.factorial(servers) * (servers - load))
        assert erlang_c(servers, float(load)) == pytest.approx(float(last / (sums + last)), rel=1e-15)
    assert erlang_c(3, 2.0) == pytest.approx(4 / 9)


def test_the_search_above_many_servers_finds_the_smallest() -> None:
    for rate, wait_s in ((15_000.0, 0.001), (40_000.0, 0.0001), (9_985.0, 0.01)):
        servers = servers_for_wait(rate, 0.1, 4.0, 1.0, wait_s, 100_000)
        load = rate * 0.1
        waits = [erlang_c(c, load) * 0.1 / (c - load) * 2.5 for c in (servers, servers - 1) if c > load]
        assert waits[0] <= wait_s
        assert len(waits) == 1 or waits[1] > wait_s

"""The search for goodputs: bisection between two bounds, and below them for what held nowhere there."""

from __future__ import annotations

import asyncio

import pytest

from keystage.bench.deferred import HIGH, LOW, LOWER, MORE_STEPS, Cell, _round
from keystage.bench.deferred_world import Load, Run

BOUND_RPS = 100.0


def goodput(holds_rps: float, steps: int = 8) -> tuple[float, int]:
    """What is found of something that holds up to such a rate, and the runs it took."""
    asked: list[float] = []

    async def answered(batching: str, load: Load) -> Run:
        asked.append(load.rate_rps)
        return Run(1.0 if load.rate_rps <= holds_rps else 0.5, 1.0, 0.0, 0.0, {})

    cell = Cell("a", "", None, BOUND_RPS, ("eager",))  # type: ignore[arg-type]
    found = asyncio.run(_round(answered, cell, 0, steps, 1.0))["eager"]
    return found.goodput_rps, len(asked)


def test_it_is_found_between_the_bounds() -> None:
    found_rps, runs = goodput(60.0)
    assert 0.99 * 60 <= found_rps <= 60
    assert runs == 8


def test_what_holds_at_lower_rates_alone_is_found_there() -> None:
    found_rps, runs = goodput(LOW * BOUND_RPS / 2)
    assert LOWER * LOW / 2 * BOUND_RPS <= found_rps <= LOW / 2 * BOUND_RPS
    assert runs > 8


def test_what_holds_nowhere_has_none() -> None:
    assert goodput(0.0) == (0.0, 8 + MORE_STEPS)


def test_the_upper_bound_is_the_most() -> None:
    assert goodput(1e9)[0] == pytest.approx(HIGH * BOUND_RPS, rel=0.02)

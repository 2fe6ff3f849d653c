"""Batch service: size by share, capacity, stability, formation, departures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keystage.controller.maths import batching

ALPHA_S, BETA_S = 0.002, 0.010


@pytest.mark.parametrize(
    ("share_s", "batch"), [(0.0, 1), (0.02, 1), (0.024, 1), (0.028, 2), (0.0839, 15), (0.084, 16), (9.0, 32)]
)
def test_the_batch_fills_half_the_share(share_s: float, batch: int) -> None:
    assert batching.largest_batch(ALPHA_S, BETA_S, 32, share_s) == batch


def test_capacity_grows_towards_one_over_alpha() -> None:
    rates = [batching.capacity_rps(ALPHA_S, BETA_S, b) for b in (1, 2, 8, 64, 100_000)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 / 0.012)
    assert rates[-1] == pytest.approx(1 / ALPHA_S, rel=1e-4)
    assert batching.item_s(ALPHA_S, BETA_S, 8) == pytest.approx(0.026 / 8)


def test_formation_is_the_mean_wait_for_the_last_of_a_batch() -> None:
    """Items of a batch of 5 with gaps of 0.1 s wait 0.4, 0.3, 0.2, 0.1 and 0 s."""
    assert batching.formation_s(5, 10.0) == pytest.approx(sum((0.4, 0.3, 0.2, 0.1, 0.0)) / 5)
    assert batching.formation_s(1, 0.0) == 0.0
    assert batching.formation_s(2, 0.0) == math.inf


def test_the_smallest_stable_batch() -> None:
    for rate, servers in ((100.0, 1), (300.0, 1), (499.0, 1), (900.0, 2)):
        batch = batching.smallest_stable_batch(ALPHA_S, BETA_S, rate, servers)
        assert batch is not None
        assert rate < servers * batching.capacity_rps(ALPHA_S, BETA_S, batch)
        fewer_rps = servers * batching.capacity_rps(ALPHA_S, BETA_S, batch - 1) if batch > 1 else 0.0
        assert rate >= fewer_rps * (1 - 1e-12)
    assert batching.smallest_stable_batch(ALPHA_S, BETA_S, 500.0, 1) is None


def test_larger_batches_turn_overload_into_a_finite_time() -> None:
    assert batching.batch_sojourn_s(ALPHA_S, BETA_S, 1, 200.0, 1, 1.0, 0.0) == math.inf
    assert batching.batch_sojourn_s(ALPHA_S, BETA_S, 8, 200.0, 1, 1.0, 0.0) < 0.2


def test_batches_of_one_are_plain_mg1() -> None:
    """Pollaczek-Khinchine for constant service: rho s / (2 (1 - rho)) + s."""
    rate, service_s = 50.0, 0.012
    rho = rate * service_s
    expected_s = rho * service_s / (2 * (1 - rho)) + service_s
    assert batching.batch_sojourn_s(ALPHA_S, BETA_S, 1, rate, 1, 1.0, 0.0) == pytest.approx(expected_s)


@pytest.mark.parametrize("batch_gap_scv", [0.0, 1.0, 3.0])
def test_departures_in_batches_are_bursty(batch_gap_scv: float) -> None:
    """Against a million gaps drawn one by one: b - 1 of 0, then one of a whole batch gap."""
    rng = np.random.default_rng(7)
    gaps = np.ones(200_000) if not batch_gap_scv else rng.gamma(1 / batch_gap_scv, batch_gap_scv, 200_000)
    items = np.zeros((len(gaps), 5))
    items[:, 0] = gaps
    measured = items.var() / items.mean() ** 2
    assert measured == pytest.approx(batching.departure_scv(5, batch_gap_scv), rel=0.02)
    assert batching.departure_scv(5) == 4.0


def test_garbage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"not both 0, got 0\.0 and 0\.0"):
        batching.batch_s(0.0, 0.0, 1)
    with pytest.raises(ValueError, match="batch must hold >= 1 items, got 0"):
        batching.capacity_rps(ALPHA_S, BETA_S, 0)
    with pytest.raises(ValueError, match=r"batch must hold >= 1 items, got 0\.5"):
        batching.formation_s(0.5, 1.0)
    with pytest.raises(ValueError, match="batch must hold >= 1 items, got 0"):
        batching.departure_scv(0)
    with pytest.raises(ValueError, match=r"variation must be >= 0, got -1\.0"):
        batching.departure_scv(2, -1.0)
    with pytest.raises(ValueError, match="largest batch must be >= 1 items, got 0"):
        batching.largest_batch(ALPHA_S, BETA_S, 0, 1.0)
    with pytest.raises(ValueError, match="share must be >= 0 s, got nan"):
        batching.largest_batch(ALPHA_S, BETA_S, 4, math.nan)
    with pytest.raises(ValueError, match="servers must be >= 1, got 0"):
        batching.smallest_stable_batch(ALPHA_S, BETA_S, 1.0, 0)
    with pytest.raises(ValueError, match=r"arrival rate must be finite and >= 0 /s, got -1\.0"):
        batching.smallest_stable_batch(ALPHA_S, BETA_S, -1.0, 1)
    with pytest.raises(ValueError, match="arrival rate must be finite and >= 0 /s, got inf"):
        batching.formation_s(2, math.inf)

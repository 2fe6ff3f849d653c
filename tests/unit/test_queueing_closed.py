"""Closed loops against closed forms: balanced rings, machine repair, mean value analysis, bounds."""

from __future__ import annotations

import math

import pytest

from keystage.controller.maths.closed import entry_wait_s, ring, ring_bounds
from keystage.controller.maths.erlang import ggc_wait_s


@pytest.mark.parametrize(("stages", "customers"), [(1, 4), (3, 1), (4, 7), (8, 200)])
def test_a_balanced_ring(stages: int, customers: int) -> None:
    """K equal single servers: X = N / ((N + K - 1) s)."""
    result = ring([0.02] * stages, [1] * stages, customers)
    assert result.throughput_rps == pytest.approx(customers / ((customers + stages - 1) * 0.02), rel=1e-12)
    assert sum(result.queues) == pytest.approx(customers)


def mean_value_analysis(services_s: list[float], customers: int, think_s: float) -> tuple[float, list[float]]:
    """Reiser and Lavenberg for single servers: R_k = s_k (1 + Q_k(n-1))."""
    queues = [0.0] * len(services_s)
    rate = 0.0
    for n in range(1, customers + 1):
        times = [s * (1 + q) for s, q in zip(services_s, queues, strict=True)]
        rate = n / (sum(times) + think_s)
        queues = [rate * t for t in times]
    return rate, queues


@pytest.mark.parametrize("think_s", [0.0, 0.5])
def test_mean_value_analysis_of_unequal_single_servers(think_s: float) -> None:
    services_s = [0.011, 0.04, 0.023, 0.0005]
    for customers in (1, 2, 9, 60):
        rate, queues = mean_value_analysis(services_s, customers, think_s)
        result = ring(services_s, [1] * 4, customers, think_s)
        assert result.throughput_rps == pytest.approx(rate, rel=1e-10)
        assert result.queues == pytest.approx(queues, rel=1e-8)
        assert result.cycle_s == pytest.approx(sum(queues) / rate, rel=1e-8)


@pytest.mark.parametrize(("machines", "repairers"), [(1, 1), (6, 1), (10, 3), (40, 5), (8, 8)])
def test_machine_repair(machines: int, repairers: int) -> None:
    """M/M/c with N sources: the birth-death chain summed term by term."""
    think_s, repair_s = 2.0, 0.7
    weights = [1.0]
    for n in range(machines):
        weights.append(weights[-1] * (machines - n) / think_s * repair_s / min(n + 1, repairers))
    total = math.fsum(weights)
    rate = math.fsum(w * min(n, repairers) / repair_s for n, w in enumerate(weights)) / total
    broken = math.fsum(w * n for n, w in enumerate(weights)) / total
    result = ring([repair_s], [repairers], machines, think_s)
    assert result.throughput_rps == pytest.approx(rate, rel=1e-10)
    assert result.queues[0] == pytest.approx(broken, rel=1e-10)
    assert result.busy_ratios[0] == pytest.approx(rate * repair_s / repairers, rel=1e-10)


def test_the_slowest_stage_limits_and_starves_the_others() -> None:
    result = ring([0.01, 0.05, 0.02], [1, 2, 1], 300)
    assert result.key_stage == 1
    assert result.throughput_rps == pytest.approx(40.0, rel=1e-6)
    assert result.busy_ratios == pytest.approx((0.4, 1.0, 0.8), rel=1e-6)
    assert result.queues[1] > 290


def test_one_more_replica_of_the_key_stage_helps_and_of_another_does_not() -> None:
    services_s = [0.01, 0.03, 0.02]
    before = ring(services_s, [1, 1, 1], 100).throughput_rps
    assert ring(services_s, [1, 2, 1], 100).throughput_rps > 1.4 * before
    assert ring(services_s, [2, 1, 1], 100).throughput_rps < 1.001 * before


def test_bounds_hold_and_meet_at_the_knee() -> None:
    services_s, servers = [0.01, 0.05, 0.02], [1, 2, 1]
    bounds = ring_bounds(services_s, servers, 1)
    assert bounds.knee == pytest.approx(0.08 * 40)
    assert bounds.key_stage == 1
    for customers in (0, 1, 2, 3, 4, 10, 500):
        bounds = ring_bounds(services_s, servers, customers, 0.1)
        result = ring(services_s, servers, customers, 0.1)
        assert result.throughput_rps <= bounds.throughput_rps * (1 + 1e-9)
        assert result.cycle_s >= bounds.cycle_s * (1 - 1e-9)


def test_extreme_rings_stay_finite() -> None:
    assert ring([0.001, 1e-9], [64, 1], 3000).throughput_rps == pytest.approx(64_000, rel=1e-3)
    assert ring([0.001], [1], 50, think_s=1e6).throughput_rps == pytest.approx(50 / 1e6, rel=1e-6)


def test_sessions_wait_at_entry_for_replicas_times_slots() -> None:
    assert entry_wait_s(3.0, 4.0, 2, 8, 1.0, 1.0) == ggc_wait_s(3.0, 4.0, 16, 1.0, 1.0)
    assert entry_wait_s(4.0, 4.0, 2, 8, 1.0, 1.0) == math.inf


def test_garbage_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a ring needs >= 1 stage; got 0 services"):
        ring([], [], 1)
    with pytest.raises(ValueError, match="services must be finite and > 0 s"):
        ring([0.0], [1], 1)
    with pytest.raises(ValueError, match=r"servers must be >= 1 at every stage, got \[0\]"):
        ring([1.0], [0], 1)
    with pytest.raises(ValueError, match="customers must be >= 0, got -1"):
        ring_bounds([1.0], [1], -1)
    with pytest.raises(ValueError, match="think time must be finite and >= 0 s, got inf"):
        ring([1.0], [1], 1, math.inf)
    with pytest.raises(ValueError, match="replicas and slots must be >= 0, got -1 and 8"):
        entry_wait_s(1.0, 1.0, -1, 8, 1.0, 1.0)

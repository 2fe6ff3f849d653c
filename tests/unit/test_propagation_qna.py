"""How the variation of arrivals travels through stages: limits that theory knows, and the array form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keystage.controller.maths import qna
from keystage.controller.maths.qna import Station


def test_an_empty_stage_passes_the_variation_on():
    for scv in (0.01, 1.0, 64.0):
        assert qna.depart(scv, Station(0.0, 1), 0.0)[0] == pytest.approx(scv)


def test_poisson_through_exponential_service_stays_poisson():
    """Burke: departures of M/M/1 are Poisson."""
    for rho in (0.1, 0.5, 0.9):
        assert qna.depart(1.0, Station(rho, 1, service_scv=1.0), 0.0)[0] == pytest.approx(1.0, abs=0.15)
        assert qna.whitt(1.0, Station(rho, 1, service_scv=1.0)) == pytest.approx(1.0)


def test_a_saturated_single_server_departs_at_its_own_rhythm():
    for scv in (0.1, 1.0, 64.0):
        assert qna.depart(scv, Station(1.0, 1, service_scv=0.3), 0.0)[0] == pytest.approx(0.3)
        assert qna.whitt(scv, Station(1.5, 1, service_scv=0.3)) == pytest.approx(0.3)


def test_whitt_as_printed():
    station = Station(0.6, 4, service_scv=0.25)
    assert qna.whitt(9.0, station) == pytest.approx(1 + 0.64 * 8 + 0.36 / 2 * (0.25 - 1))


def test_steady_batches_give_their_size_less_one():
    """Regular arrivals, constant service, one server that always fills its batch of 5."""
    station = Station(1.0, 1, service_scv=0.0, most=5)
    assert qna.mean_batch(station) == 5
    assert qna.depart(0.0, station, 0.0)[0] == pytest.approx(5 - 1)


def test_batches_follow_the_load():
    sizes = [qna.mean_batch(Station(rho, 2, most=8, fixed_ratio=0.9)) for rho in (0.05, 0.5, 0.8, 0.95)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1.0
    assert 1 < sizes[2] < 8
    n, s, rho, c, b = sizes[2], 0.9, 0.8, 2, 8
    alone = rho * c * b / ((1 - s) * b + s)
    assert n == pytest.approx(((1 - s) * n + s) * alone / c)  # n = lambda l(n) / c


def test_a_burst_waits_once_in_constant_services_in_a_row():
    """Friedman 1965: behind the slowest stage a faster one of constant service smooths nothing more."""
    first, passed = qna.depart(64.0, Station(0.8, 1), 0.0)
    again, _ = qna.depart(first, Station(0.6, 1), passed)
    fresh, _ = qna.depart(first, Station(0.6, 1), 0.0)
    assert again == pytest.approx(first)
    assert fresh < 0.6 * first


def test_the_formula_as_printed_loses_the_burst_behind_the_slowest_stage():
    """Eight equal stages at CV 8: the printed formula smooths at each, simulation (see training) at one."""
    chain = [Station(0.6, 1)] * 8
    printed = 64.0
    for station in chain[:-1]:
        printed = qna.whitt(printed, station)
    assert printed < 4
    assert qna.propagate(64.0, chain)[-1] == pytest.approx(qna.propagate(64.0, chain)[1])


def test_arrays_and_scalars_are_the_same_formula():
    random = np.random.default_rng(3)
    pipelines = [
        [
            Station(
                float(random.uniform(0, 1.2)),
                float(random.integers(1, 30)),
                float(random.uniform(0, 2)),
                float(random.integers(1, 17)),
                float(random.uniform(0, 1)),
            )
            for _ in range(8)
        ]
        for _ in range(50)
    ]
    entry = np.exp(random.uniform(-5, 5, 50))
    many = qna.flow(entry, qna.chains(pipelines)).scv
    for row, scv, stations in zip(many, entry, pipelines, strict=True):
        assert row == pytest.approx(qna.propagate(float(scv), stations), rel=1e-9)


def test_splitting_and_merging():
    assert qna.split_scv(9.0, 1.0) == 9.0
    assert qna.split_scv(9.0, 0.25) == pytest.approx(0.25 * 9 + 0.75)
    assert qna.merge_scv([4.0], [7.0], 0.5) == pytest.approx(7.0)
    assert qna.merge_scv([1.0] * 400, [9.0] * 400, 0.1) == pytest.approx(1.0, abs=0.05)  # towards Poisson
    assert qna.merge_scv([1.0, 3.0], [2.0, 4.0], 1.0) == pytest.approx(0.25 * 2 + 0.75 * 4)
    with pytest.raises(ValueError, match="rate above 0"):
        qna.merge_scv([0.0], [1.0], 0.5)


def test_an_empty_chain_has_no_stages():
    assert qna.propagate(4.0, []) == []


def test_results_are_bounded_below():
    assert math.sqrt(qna.propagate(0.0, [Station(0.5, 1)] * 3)[-1]) > 0

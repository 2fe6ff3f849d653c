"""A lane of the burst benchmark, really run: same arrivals under a static allocation and a controller."""

from __future__ import annotations

import dataclasses

import pytest

from keystage.bench.burst_lane import Run, measure

pytestmark = pytest.mark.slow

RUN = Run(1, 7, (0.01, 0.02), 40.0, 4.0, 3.0)


def test_a_static_lane_holds_its_allocation() -> None:
    (outcome,) = measure([dataclasses.replace(RUN, replicas=(1, 2))])
    assert outcome.failed == 0
    assert len(outcome.latencies_s) == 120
    assert min(outcome.latencies_s) >= 0.03
    assert outcome.replicas == pytest.approx((1.0, 2.0))
    assert (outcome.decisions, outcome.cold_starts, outcome.key_ratio) == (0, 0, 0.0)


def test_a_controlled_lane_counts_what_the_controller_did() -> None:
    (outcome,) = measure([RUN])
    assert outcome.failed == 0
    assert len(outcome.latencies_s) == 120
    assert sum(outcome.replicas) > 2.0
    assert outcome.decisions > 0
    assert outcome.cold_starts > 0
    assert 0 < outcome.key_ratio <= 1
    assert outcome.used_s > 0

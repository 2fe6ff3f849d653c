"""What `keystage bench sim-vs-local` makes of two worlds: the twin, the warm-up, the figures."""

from __future__ import annotations

import numpy as np
import pytest

from keystage.bench.burst import CV
from keystage.bench.burst_lane import WARM_UP_REQUESTS, Outcome, Run
from keystage.bench.sim_vs_local import (
    LEAD_S,
    RATE_RPS,
    SERVICES_S,
    SLOW_STAGE,
    Pair,
    Profile,
    result,
    world,
)
from keystage.simulator.run import simulate

RUN = Run(SLOW_STAGE, 4, SERVICES_S, RATE_RPS, CV, 10.0)
PROFILE = Profile(beside_s=0.003, occupied_s=0.0005)


def pair(local_s: float, replicas: tuple[float, ...]) -> Pair:
    twin = simulate(world([0.0, 1.0, 2.0], 0.5, PROFILE), None, 4)
    local = Outcome(RUN, [local_s] * 3, 0, 0.001, replicas, cold_starts=2)
    return Pair(local, twin, (1.0, 2.0, 1.0, 1.0), 0.5)


def test_an_idle_twin_takes_service_and_what_is_beside_it() -> None:
    twin = simulate(world([0.0, 1.0, 2.0], 0.5, PROFILE), None, 4)
    assert len(twin.pipelines[0].arrived_s) == WARM_UP_REQUESTS + 3 == 13
    assert twin.pipelines[0].latency_s == pytest.approx(
        np.full(WARM_UP_REQUESTS + 3, sum(SERVICES_S) + 0.003)
    )


def test_only_the_schedule_is_compared() -> None:
    found = pair(0.1, (1.0, 1.5, 1.0, 1.0))
    assert len(found.simulated_s) == 3
    assert found.simulated.pipelines[0].arrived_s[-3] == LEAD_S
    assert found.latencies_s == pytest.approx((0.1, sum(SERVICES_S) + 0.003))
    assert found.replicas == pytest.approx((4.5, 5.0))


def test_figures_are_simulated_over_local() -> None:
    found = result([pair(0.1, (1.0, 1.5, 1.0, 1.0)), pair(0.05, (1.0, 2.0, 1.0, 1.0))], PROFILE)
    twin_s = sum(SERVICES_S) + 0.003
    assert found.figures["latency_vs_local"].samples == pytest.approx([twin_s / 0.1, twin_s / 0.05])
    assert found.figures["gpu_seconds_vs_local"].samples == pytest.approx([5.0 / 4.5, 1.0])
    assert [row["world"] for row in found.rows] == ["local", "simulator"] * 2
    assert len({tuple(row) for row in found.rows}) == 1
    assert found.rows[0]["replica_s"] == pytest.approx(45.0)

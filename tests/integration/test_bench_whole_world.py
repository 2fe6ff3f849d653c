"""The real local platform under policies, as the benchmarks of the whole run it, at small size."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from keystage.bench.sim_vs_local import Profile
from keystage.bench.steered import Order
from keystage.bench.whole_faults import faults_of
from keystage.bench.whole_models import Part
from keystage.bench.whole_score import live_score
from keystage.bench.whole_twin import simulated
from keystage.bench.whole_watch import ROLES
from keystage.bench.whole_world import Outcome, Plan, Served, measure
from keystage.loadgen.arrivals import synthetic

pytestmark = pytest.mark.slow

PARTS = (Part(0.005, 0.005, 2), Part(0.01, 0.01, 2))
DURATION_S = 4.0


def served(name: str, replicas: tuple[int, ...] = (1, 1), rate_rps: float = 50.0) -> Served:
    times_s = np.asarray(synthetic(rate_rps, 3.0, DURATION_S, 11))
    return Served(name, PARTS[: len(replicas)], times_s, 0.3, replicas)


def check(outcome: Outcome) -> None:
    """Every request has an end that is known, and nothing stays behind."""
    assert faults_of(outcome) == []
    for one, sent in zip(outcome.plan.served, outcome.sent, strict=True):
        assert len(sent.scheduled_s) == len(one.times_s)
        assert sent.is_served.all()
        assert sent.router.accepted == sent.router.completed == len(one.times_s)
        assert sent.latency_s.min() >= sum(part.item_s for part in one.parts)


def test_nobody_steers_and_the_allocation_stays() -> None:
    outcome = measure(Plan((served("still", (1, 2)),), DURATION_S, None, 8))
    check(outcome)
    assert outcome.replicas[0] == pytest.approx((1.0, 2.0))
    assert (outcome.started, outcome.most_replicas) == (0, 3)
    assert len(outcome.sent[0].queues) == 2


def test_a_rival_steers_the_platform_within_its_budget() -> None:
    """Static is told a rate for which one replica a stage cannot do; it keeps to the budget."""
    from keystage.bench.paper_policies import Traffic

    order = Order(policy="static", traffic=[Traffic("ruled", 250.0, 1.0)])
    outcome = measure(Plan((served("ruled"),), DURATION_S, order, 5))
    check(outcome)
    assert outcome.most_replicas == 5
    twin = simulated(outcome, Profile(0.003, 0.0005), 11)
    live = live_score(outcome)
    assert twin.counted == live.counted == len(outcome.plan.served[0].times_s)
    assert twin.gpu_s == pytest.approx(live.gpu_s, rel=0.5)


def test_the_controller_steers_two_pipelines_through_the_gateway() -> None:
    plan = Plan(
        (served("left"), served("right", (1,), 20.0)),
        DURATION_S,
        Order(policy="keystage"),
        12,
        through_gateway=True,
        processes_every_s=1.0,
    )
    # It has ended, and nobody has waited for it when processes are counted.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    outcome = measure(plan)
    ended.wait()
    check(outcome)
    assert sum(map(sum, outcome.replicas)) >= 3.0
    seen = {ROLES[int(role)] for role in outcome.processes[:, 2]}
    assert {"supervisor", "gateway", "controller", "router", "worker"} <= seen
    assert (outcome.processes[:, 3:-1] > 0).all()
    assert (outcome.processes[:, -1] >= 0).all()  # shared memory: few hold any
    assert outcome.used_cores > 0

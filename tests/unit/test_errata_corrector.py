"""QUART Eq. 1, Eq. 3 and Algorithm 1 as printed give wrong answers; ours do not."""

from __future__ import annotations

import math

import pytest
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.domain.snapshot import Slo
from keystage.controller.domain.state import PidState
from keystage.controller.maths import pid
from keystage.controller.maths.erlang import mmc_wait_s, servers_for_wait
from keystage.controller.maths.pid import PidGains

MU = 100.0


def balanced(rate: float, servers: int) -> tuple[float, float]:
    """P0 and the mean sojourn of M/M/c from its balance equations, 200,000 states summed."""
    weight, total, items = 1.0, 1.0, 0.0
    for n in range(1, 200_000):
        weight *= rate / (min(n, servers) * MU)
        total += weight
        items += n * weight
        if weight < 1e-18 * total:
            break
    return 1 / total, items / total / rate  # Little


def printed_sojourn_s(rate: float, servers: int) -> float:
    """Eq. 1: T = P0 lambda / (r mu (mu - lambda / r)) + 1 / mu."""
    empty, _ = balanced(rate, servers)
    return empty * rate / (servers * MU * (MU - rate / servers)) + 1 / MU


@pytest.mark.parametrize("servers", [1, 2, 4, 16])
@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.9, 0.99])
def test_equation_1_is_not_the_mmc_sojourn(servers: int, utilisation: float) -> None:
    rate = utilisation * servers * MU
    _, exact_s = balanced(rate, servers)
    assert mmc_wait_s(rate, 1 / MU, servers) + 1 / MU == pytest.approx(exact_s, rel=1e-9)
    printed_wait_s = printed_sojourn_s(rate, servers) - 1 / MU
    assert abs(printed_wait_s / (exact_s - 1 / MU) - 1) > 0.09


def test_equation_1_meets_the_exact_formula_in_one_point() -> None:
    """At r = 2, rho = 1/2 the two are equal: a test there would prove nothing."""
    assert printed_sojourn_s(MU, 2) == pytest.approx(mmc_wait_s(MU, 1 / MU, 2) + 1 / MU, rel=1e-12)


def test_equation_1_stays_finite_at_full_load_and_adds_no_replica() -> None:
    for utilisation in (0.9, 0.99, 0.999, 0.9999):
        assert printed_sojourn_s(utilisation * MU, 1) < 2 / MU
    rate, target_s = 0.99 * MU, 5 / MU
    assert printed_sojourn_s(rate, 1) <= target_s  # the printed formula is content with one replica
    assert balanced(rate, 1)[1] > 15 * target_s  # which waits a second
    assert servers_for_wait(rate, 1 / MU, 1.0, 1.0, target_s - 1 / MU, 100) == 2


def test_equation_3_removes_replicas_when_the_queue_is_too_long() -> None:
    """Algorithm 1, line 2: e = T_target - T_i, and r' = r + kp e + ki int e dt + kd de/dt."""
    target_s, measured_s, gains = 0.1, 1.0, PidGains(kp=2.0, ki=0.5)
    error_s = target_s - measured_s
    printed = gains.kp * error_s + gains.ki * error_s * 0.25
    assert printed < 0  # fewer, the longer the queue
    ours, _ = pid.step(gains, PidState(), math.log(measured_s / target_s), 0.25)
    assert ours > 0
    relieved, _ = pid.step(gains, PidState(), math.log(0.02 / target_s), 0.25)
    assert relieved < 0


def test_a_stage_slower_than_its_model_gets_more_not_fewer() -> None:
    """The same through the whole policy: waits above the model for a minute lead to a positive trim."""
    world = FluidWorld([FluidStage(0.02)])
    world.run(60, 20)
    for _ in range(240):
        stage = world.stages[0]
        stage.sojourn_s += 60 * 0.25 * 0.2  # each item reports 0.2 s more than the fluid has
        decision = world.step(60)
    assert decision.reports[0].trim > 0
    calm = FluidWorld([FluidStage(0.02)]).run(60, 80).reports[0]
    assert decision.reports[0].wanted >= calm.wanted


def printed_allocate_cpu(times_s: list[float], cores: list[float], target_s: float) -> list[float]:
    """Algorithm 1, lines 14-24, with its `return` inside the loop (line 23)."""
    grown = list(cores)
    for i, time_s in enumerate(times_s):
        if time_s > target_s:
            grown[i] = min(8.0, cores[i] * time_s / target_s)
        return grown
    return grown


def test_algorithm_1_returns_after_the_first_stage() -> None:
    assert printed_allocate_cpu([0.05, 0.4, 0.3], [1.0, 1.0, 1.0], 0.1) == [1.0, 1.0, 1.0]
    assert printed_allocate_cpu([0.2, 0.4, 0.3], [1.0, 1.0, 1.0], 0.1) == [2.0, 1.0, 1.0]


def test_algorithm_1_takes_back_what_correct_has_just_given() -> None:
    """Correct asks for 5 replicas because of a backlog; Smooth computes from rate and CV alone: 2."""
    rate, service_s, backlog, drain_s = 150.0, 0.01, 300.0, 1.0
    corrected = math.ceil((rate + backlog / drain_s) * service_s)
    smoothed = servers_for_wait(rate, service_s, 1.0, 1.0, 0.05, 100)
    assert (corrected, smoothed) == (5, 2)  # line 8 replaces r' by what rate and CV need
    assert rate * drain_s + backlog > smoothed / service_s * drain_s  # so the backlog stays

    world = FluidWorld([FluidStage(0.01), FluidStage(0.01), FluidStage(0.01)], slo=Slo(deadline_s=1.0))
    world.run(150, 30)
    for stage in world.stages:
        stage.queue += 300
    decision = world.step(150)
    ours = [r.replicas for r in decision.reports]
    assert min(ours) >= 5
    assert world.run(150, 1.0).reports[1].replicas >= ours[1]  # and not lowered a moment later

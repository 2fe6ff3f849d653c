"""The simulator against queueing theory: mean waits by batch means, within three standard errors.

Formulas are computed here by themselves (Erlang B recursion, Pollaczek-Khinchine), not by the code under
test. Standard errors are held to 1, 1 and 4 % at utilisation 0.5, 0.8 and 0.95.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.simulated_worlds import line, world

from keystage.simulator.api import StageSpec
from keystage.simulator.draws import factors
from keystage.simulator.measures import check
from keystage.simulator.run import simulate

pytestmark = pytest.mark.slow

BATCHES = 40
SERVICE_S = 0.01
MOST_ERROR = {0.5: 0.01, 0.8: 0.01, 0.95: 0.04}
ITEMS = {0.5: 800_000, 0.8: 2_000_000, 0.95: 1_300_000}


def erlang_c_wait_s(rho: float, servers: int) -> float:
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = rho * servers * blocked / (k + rho * servers * blocked)
    waits = blocked / (1 - rho * (1 - blocked))
    return waits * SERVICE_S / (servers * (1 - rho))


def measured_wait_s(rho: float, servers: int, scv: float, items: int, seed: int) -> tuple[float, float]:
    """Mean wait and its standard error by batch means, after a twentieth of warm-up."""
    stage = StageSpec(alpha_s=SERVICE_S, scv=scv, replicas=servers)
    outcome = simulate(world(line(stage, rate_rps=rho * servers / SERVICE_S, count=items)), None, seed)
    check(outcome)
    drawn = factors(scv, items, seed, 0, 0)
    assert drawn is not None
    waits_s = outcome.pipelines[0].latency_s - SERVICE_S * np.frombuffer(drawn)
    waits_s = waits_s[items // 20 :]
    means = waits_s[: len(waits_s) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(BATCHES))


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(("servers", "scv"), [(1, 1.0), (2, 1.0), (1, 0.5)], ids=["M/M/1", "M/M/2", "M/G/1"])
def test_mean_waits_are_those_of_theory(rho: float, servers: int, scv: float) -> None:
    general_s = rho * SERVICE_S * (1 + scv) / 2 / (1 - rho)
    theory_s = general_s if servers == 1 else erlang_c_wait_s(rho, servers)
    wait_s, error_s = measured_wait_s(rho, servers, scv, ITEMS[rho], seed=7)
    assert error_s <= MOST_ERROR[rho] * theory_s, f"standard error {error_s / theory_s:.2%}"
    assert abs(wait_s - theory_s) <= 3 * error_s, f"{wait_s} s, theory {theory_s} s, error {error_s} s"

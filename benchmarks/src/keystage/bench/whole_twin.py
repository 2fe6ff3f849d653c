"""The simulated twin of a run of the real platform: same pipelines, policy, arrivals and pool.

Before it: `whole_world` gave an outcome. After it: a score beside the live one. The twin is told what
`sim_vs_local` measures of hand-offs, and of each live run the median of its start times and their spread
(standard deviation of the logarithm): start times are part of a profile, and on two cores they depend on how
many replicas start at once. It sees the same warm-up before the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keystage.bench.sim_vs_local import Profile, measured_profile
from keystage.bench.steered import steering
from keystage.bench.whole_client import WARM_UP_GAP_S, WARM_UP_REQUESTS
from keystage.bench.whole_models import STAGES, stage_specs
from keystage.bench.whole_score import Score, simulated_score
from keystage.bench.whole_world import LEAD_S, Outcome, Served, WholeError
from keystage.controller.domain.snapshot import Slo
from keystage.controller.policy.settings import PolicySettings
from keystage.local.errors import LocalError
from keystage.simulator import api
from keystage.simulator.run import simulate
from keystage.simulator.watch import Watched

MOST_REPLICAS = 20
"""The local world's own bound of a function."""
PATIENCE_S = 300.0
WARM_S = WARM_UP_GAP_S * WARM_UP_REQUESTS + LEAD_S
"""From the first request of the warm-up to the schedule."""


def measured_beside() -> Profile:
    """What hand-offs take on this machine, measured now; half a minute.

    Raises:
        WholeError: the worlds for it did not come up.
        NoAnswers: requests failed in them.
    """
    try:
        return measured_profile()
    except LocalError as error:
        raise WholeError(str(error)) from error


def start_times(starts_s: Sequence[float]) -> api.LoadSpec:
    """Median of start times and spread of their logarithm; without any the policy's default."""
    if not starts_s:
        return api.LoadSpec(fixed_s=PolicySettings().start_s)
    logs = np.log(np.maximum(starts_s, 1e-3))
    return api.LoadSpec(fixed_s=float(np.exp(np.median(logs))), spread_s=float(logs.std()))


def twin(served: Sequence[Served], profile: Profile, load: api.LoadSpec, budget_replicas: int) -> api.World:
    """The simulated world.

    Args:
        served: the pipelines with their arrivals.
        profile: what a request takes beside its service, measured on four stages.
        load: start times.
        budget_replicas: R_total.
    """
    warm_up = [WARM_UP_GAP_S * i for i in range(WARM_UP_REQUESTS)]
    between_s = max(0.0, profile.beside_s - STAGES * profile.occupied_s)
    last_s = WARM_S + max(float(one.times_s[-1]) for one in served if len(one.times_s))
    return api.World(
        pipelines=tuple(
            api.PipelineSpec(
                name=one.name,
                stages=stage_specs(
                    one.parts, one.replicas, most_replicas=MOST_REPLICAS, occupied_s=profile.occupied_s
                ),
                arrivals=api.ArrivalSpec(times_s=tuple(warm_up + (WARM_S + one.times_s).tolist())),
                slo=Slo(deadline_s=one.deadline_s),
            )
            for one in served
        ),
        load=load,
        hop_s=between_s / (STAGES - 1),
        duration_s=last_s,
        limit_s=last_s + PATIENCE_S,
        budget_replicas=budget_replicas,
        warm_s=WARM_S,
    )


def simulated(outcome: Outcome, profile: Profile, seed: int) -> Score:
    """The twin of a live run under the same policy."""
    plan = outcome.plan
    watched = Watched(None if plan.order is None else steering(plan.order))
    world = twin(plan.served, profile, start_times(outcome.start_s), plan.budget_replicas)
    found = simulate(world, watched, seed)
    return simulated_score(
        found,
        watched.points,
        [one.parts for one in plan.served],
        [one.deadline_s for one in plan.served],
        warm_s=WARM_S,
        duration_s=plan.duration_s,
    )

"""The smoother: takes back replicas that the traffic reaching a stage cannot fill (QUART section 5.2).

Before it: corrected, ranked, clamped and damped plans: y is what a stage has, or is given now; damping holds
a surplus for a while, in case of the next burst. After it: the compensator and the budget. It only reclaims:
no stage gets more, key stages are left alone, and nothing falls below the corrected need, below what the
stages in front can deliver while they have a backlog, or below the minimum.

Symbols, per stage i of a chain: y replicas, mu items/s of one replica, lambda items/s, z = y mu / lambda
head-room, N(i) the stages before and behind.

    beta(CV) = CV^2 / (CV^2 + 1)
    z'_i     = beta(CV_i) z_i + (1 - beta(CV_i)) mean of z_j over N(i)
    y'_i     = min(y_i, max(corrected need + 1, ceil(z'_i lambda / mu_i)))

beta is the part of a G/M/1 wait that its arrivals cause (Allen-Cunneen: ca2 / (ca2 + cs2), cs2 = 1): under
bursts it is 1 and nothing is given away before its time, under a regular flow 0, and head-room beyond the
neighbours' is of no use. Rounded up, because half a replica less is a queue and half a replica more is
not. One replica above the need is left to the damping: a number that flickers by one must not swing.

Deviations from the paper: Eq. 7 averages replica numbers of unequal stages and can raise a stage
([2, 8, 2, 2] at beta 0.5 becomes 15.5 out of 14); head-room is comparable and never raised here.
The CV comes from `maths.qna` or `maths.attention`; both are made for chains, so looping pipelines, and graphs
with branches, pass as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from keystage.controller.domain.snapshot import PipelineView, StageView
from keystage.controller.maths import attention, qna
from keystage.controller.maths.estimator import MOST_SCV, is_number
from keystage.controller.maths.qna import Station
from keystage.controller.policy import demand
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.service import Service, service
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings
from keystage.controller.policy.shares import is_chain, predecessors

Predictor = Callable[[float, Sequence[Station]], list[float]]
"""Arrival scv at the entry and the chain -> arrival scv of every stage."""

PREDICTORS: dict[str, Predictor] = {"qna": qna.propagate, "attention": attention.propagate}

KEY_RATIO = 1 / 3
"""Part of the stages (rounded up) that counts as key stages and is never made smaller: of eight the first
three in the list, as many as KeysManager keeps in host memory by default."""

SPARE = 1
"""Replicas above the corrected need that are left to the damping."""


def predicted_scv(settings: PolicySettings, view: PipelineView, plans: Sequence[Plan]) -> list[float | None]:
    """Predicted squared CV of every stage's arrivals at the replicas wanted; None where nothing tells it.

    The entry's is its own estimate. All None for looping pipelines, graphs that are no chain, missing data or
    smoothing `off`.
    """
    unknown: list[float | None] = [None] * len(plans)
    predictor = PREDICTORS.get(settings.smoothing)
    if predictor is None or not plans or view.execution == "looping" or any(p.is_held for p in plans):
        return unknown
    if not is_chain(predecessors(view.stages)):
        return unknown
    rate_rps = plans[0].known.arrival_slow_rps or plans[0].known.arrival_rps
    entry = plans[0].known.arrival_scv
    if not is_number(rate_rps) or rate_rps <= 0 or not is_number(entry) or entry < 0:
        return unknown
    stations = [
        _station(settings, stage, plan, rate_rps) for stage, plan in zip(view.stages, plans, strict=True)
    ]
    known = [s for s in stations if s is not None]
    if len(known) < len(stations):
        return unknown
    return list(predictor(min(MOST_SCV, entry), known))


def _station(settings: PolicySettings, stage: StageView, plan: Plan, rate_rps: float) -> Station | None:
    """The stage as the predictors see it, None where its service is not known."""
    serving = _serving_of(settings, stage, plan)
    if serving is None:
        return None
    servers = max(1, min(MOST_REPLICAS, plan.wanted))
    scv = plan.known.service_scv
    return Station(
        utilisation=min(1.0, rate_rps / (servers * serving.rps(serving.most))),
        servers=servers,
        service_scv=min(MOST_SCV, scv) if is_number(scv) and scv >= 0 else 1.0,
        most=serving.most,
        fixed_ratio=serving.beta_s / serving.alone_s if serving.beta_s > 0 else 0.0,
    )


def _serving_of(settings: PolicySettings, stage: StageView, plan: Plan) -> Service | None:
    """How a replica serves; None where nobody knows."""
    known = plan.known
    if not (is_number(known.service_s) and is_number(known.capacity_rps)):
        return None
    if min(known.service_s, known.capacity_rps) <= 0:
        return None
    serving = plan.serving or service(settings, stage.batch, known)
    return serving if 0 < serving.rps(serving.most) < math.inf and serving.alone_s > 0 else None


def smooth(settings: PolicySettings, view: PipelineView, plans: Sequence[Plan]) -> list[Plan]:
    """Lowers the wanted replicas of one pipeline's stages where they have more than they can use.

    Nothing is predicted where no stage holds more than need, spare and load: there is nothing to reclaim.
    """
    keys = math.ceil(KEY_RATIO * len(plans))
    if not any(p.rank >= keys and p.wanted > max(p.corrected + SPARE, p.lowest) for p in plans):
        return list(plans)
    pace_rps = [_replica_rps(settings, stage, plan) for stage, plan in zip(view.stages, plans, strict=True)]
    if not any(
        p.rank >= keys and rps and p.wanted > _least(settings, p, rps)
        for p, rps in zip(plans, pace_rps, strict=True)
    ):
        return list(plans)
    scvs = predicted_scv(settings, view, plans)
    if None in scvs or not all(pace_rps):
        return list(plans)
    room_rps = [p.wanted * rps for p, rps in zip(plans, pace_rps, strict=True)]  # z lambda
    smoothed: list[Plan] = []
    feed_rps, is_fed = math.inf, False
    for i, (plan, scv, rps) in enumerate(zip(plans, scvs, pace_rps, strict=True)):
        assert scv is not None
        lower = plan
        if plan.rank >= keys and not plan.is_override and not plan.is_idle and len(plans) > 1:
            around = [room_rps[j] for j in (i - 1, i + 1) if 0 <= j < len(plans)]
            beta = weight(scv)
            floor_rps = beta * room_rps[i] + (1 - beta) * sum(around) / len(around)
            floor_rps = max(floor_rps, min(room_rps[i], feed_rps) if is_fed else 0.0)
            lower = _reclaimed(settings, plan, scv, rps, math.ceil(floor_rps / rps * (1 - 1e-9)))
        smoothed.append(msgspec.structs.replace(lower, cv=math.sqrt(scv)))
        feed_rps = min(feed_rps, lower.wanted * rps)
        is_fed = is_fed or plan.known.queue > 0
    return smoothed


def _replica_rps(settings: PolicySettings, stage: StageView, plan: Plan) -> float:
    """Items/s of a busy replica in the batches its share allows: mu as the corrector has it; 0: unknown."""
    serving = _serving_of(settings, stage, plan)
    if serving is None or not is_number(plan.share_s) or plan.share_s < 0:
        return 0.0
    return serving.rps(serving.batch_within(plan.share_s))


def weight(scv: float) -> float:
    """beta: how far a stage's own head-room counts, in 0..1, rising with the squared CV."""
    return scv / (scv + 1)


def _least(settings: PolicySettings, plan: Plan, rps: float) -> int:
    """Fewest replicas that are left to a stage whatever its arrivals: need and spare, load, minimum."""
    slow_rps = plan.known.arrival_slow_rps
    if not is_number(slow_rps):
        return plan.wanted
    carried = demand.ceil_within(slow_rps / (settings.carry_ratio * rps), MOST_REPLICAS)
    return max(plan.corrected + SPARE, carried, plan.lowest)


def _reclaimed(settings: PolicySettings, plan: Plan, scv: float, rps: float, floor: int) -> Plan:
    """The plan with fewer replicas, if need, load and bounds allow."""
    wanted = max(floor, _least(settings, plan, rps))
    if wanted >= plan.wanted:
        return plan
    reason = f"{plan.reason}; {plan.wanted - wanted} reclaimed at CV {math.sqrt(scv):.2g}"
    return msgspec.structs.replace(plan, wanted=wanted, reclaimed=plan.wanted - wanted, reason=reason)

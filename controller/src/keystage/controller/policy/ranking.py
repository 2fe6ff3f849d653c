"""The key-stage list: which stage of a pipeline queues up first.

Before it: corrected plans. After it: KeysManager and placement use the list, and the budget is dealt
out by it. Scores are taken at the minimum allocation, so a stage does not leave the list because it
was given what it needed. Single-pass: modelled wait over the stage's share. Looping: the busy
fraction (a decode ring is closed: a slow stage slows its own arrivals, so waits tell nothing);
compute where a stage is compute-bound, else slots in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keystage.controller.maths import erlang
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings


def rank(
    settings: PolicySettings, plans: Sequence[Plan], execution: str, before: tuple[int, ...]
) -> list[Plan]:
    """Gives every stage of one pipeline its rank; the order of before stays where it is a close call."""
    if any(p.is_held for p in plans):
        place = {stage: i for i, stage in enumerate(before)}
        return [msgspec.structs.replace(p, rank=place.get(p.stage, len(plans))) for p in plans]
    is_bound = max((p.known.busy_ratio or 0.0 for p in plans), default=0.0) >= settings.busy_ratio
    scores = [_looping(p, is_bound) if execution == "looping" else _single_pass(p) for p in plans]
    by_stage = {p.stage: s for p, s in zip(plans, scores, strict=True)}
    order = _order(by_stage, before, settings.rank_ratio)
    place = {stage: i for i, stage in enumerate(order)}
    return [
        msgspec.structs.replace(p, rank=place[p.stage], score=s) for p, s in zip(plans, scores, strict=True)
    ]


def _single_pass(plan: Plan) -> float:
    known = plan.known
    rate_rps = known.arrival_slow_rps or 0.0
    service_s = 1 / known.capacity_rps if known.capacity_rps else 0.0
    load, least = rate_rps * service_s, max(1, plan.lowest)
    if load >= least:  # no finite wait: ordered by load, above every finite wait
        return 1e6 * load
    if least == 1:  # most stages; M/M/1 without the recursion
        wait_s = load * service_s / (1 - load) * (known.arrival_scv + known.service_scv) / 2
    else:
        wait_s = erlang.ggc_wait_s(rate_rps, service_s, least, known.arrival_scv, known.service_scv)
    return min(1e6, wait_s / plan.share_s) if plan.share_s else 0.0


def _looping(plan: Plan, is_compute_bound: bool) -> float:
    per_minimum = max(1, min(MOST_REPLICAS, plan.scale.ready)) / max(1, plan.lowest)
    busy = round(min(1e3, plan.known.busy_ratio or 0.0) * per_minimum, 3)
    if is_compute_bound:
        return busy
    return round((plan.known.slot_ratio or 0.0) * per_minimum, 1) + busy / 1000  # busy decides between equals


def _order(scores: dict[int, float], before: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    if sorted(before) == sorted(scores) and all(
        scores[later] <= ratio * scores[earlier]
        for i, earlier in enumerate(before)
        for later in before[i + 1 :]
    ):
        return before
    return tuple(sorted(scores, key=lambda stage: (-scores[stage], stage)))

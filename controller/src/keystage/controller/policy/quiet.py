"""Which pipelines need no look this tick: nothing has changed since the last one, and it left nothing to do.

Before it: the snapshot. After it: `decide` plans the others. It never delays a reaction: a counter, a
queue, a replica number, a bound or an intent that differs from what was seen last is looked at in the same
tick. What only time changes (rates that fade, a changed objective) is looked at every `rest_s`, surplus
that is held a while every `look_s`, pipelines in turn.
"""

from __future__ import annotations

import math

from keystage.controller.domain.snapshot import Counters, PipelineView, Snapshot, StageView
from keystage.controller.domain.state import PolicyState, StageState
from keystage.controller.policy.clamp import gpu_room, gpu_weight, has_room
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings


def is_due(
    settings: PolicySettings, view: PipelineView, state: PolicyState, at_s: float, phase: float
) -> bool:
    """Whether a pipeline has to be looked at.

    Args:
        settings: how long a quiet pipeline may be left alone.
        view: the pipeline.
        state: memory.
        at_s: now.
        phase: place of the pipeline among all, 0..1, so that not all are looked at in the same tick.
    """
    last_s = state.settled.get(view.pipeline)
    if last_s is None or view.missing or not 0 <= at_s - last_s < settings.rest_s:
        return True
    stages = state.stages
    look_s = settings.rest_s
    for stage in view.stages:
        memory = stages.get(stage.scale.function)
        if memory is None or not is_unchanged(stage, memory, at_s, settings.estimator.stale_s):
            return True
        if memory.low_since_s is not None:  # a surplus is held, and given back in time
            look_s = min(look_s, settings.look_s)
        if stage.scale.zero_after_s is not None and memory.desired:  # it may go to zero, in time
            look_s = min(look_s, settings.look_s)
    if at_s - last_s >= look_s:
        return True
    return math.floor(at_s / look_s + phase) != math.floor(last_s / look_s + phase)


def is_unchanged(stage: StageView, memory: StageState, at_s: float, stale_s: float) -> bool:
    """Whether a stage shows what it showed when it was looked at last, and has the replicas it should."""
    seen, routers = memory.estimator, stage.routers
    seen_s, vectors = seen.at_s, seen.routers
    if seen_s is None or at_s < seen_s or len(routers) != len(vectors):
        return False
    for router in routers:  # most changes are these
        if not is_same(router.counters, vectors.get(router.incarnation, ())):
            return False
        if at_s - seen_s > stale_s and router.at_s == seen.clocks.get(router.incarnation):
            return False
    scale = stage.scale
    desired = scale.desired
    if desired is None or desired != memory.desired or desired != scale.ready or scale.starting:
        return False
    if scale.override is not None or scale.wake:
        return False
    lowest = max(0, scale.min_replicas)
    if desired == lowest or (desired == 0 and scale.zero_after_s is not None):
        return desired <= MOST_REPLICAS
    cap = scale.cap
    return lowest < desired <= min(MOST_REPLICAS, scale.max_replicas) and (cap is None or desired <= cap)


def is_same(now: Counters, seen: tuple[float, ...]) -> bool:
    """Whether counters are those of `estimator.vector` seen last; what is not a number is never the same."""
    return (
        now.arrivals, now.gap_sum_s, now.gap_sq_sum_s2, now.services,
        now.service_sum_s, now.service_sq_sum_s2, now.sojourn_sum_s, now.queue or 0.0, now.in_flight or 0.0,
    ) == seen  # fmt: skip


def looks(settings: PolicySettings, snapshot: Snapshot, state: PolicyState) -> list[bool]:
    """Per pipeline whether it has to be looked at; all of them while the budget, or the GPUs, are used up."""
    views = snapshot.pipelines
    if is_short(snapshot):
        return [True] * len(views)
    return [is_due(settings, v, state, snapshot.at_s, i / len(views)) for i, v in enumerate(views)]


def is_short(snapshot: Snapshot) -> bool:
    """Whether there may be too little for one replica more (`policy.clamp.deal`)."""
    stages = [stage for view in snapshot.pipelines for stage in view.stages]
    if snapshot.budget_replicas is not None:
        return sum(stage.scale.current for stage in stages) >= snapshot.budget_replicas
    most = max((stage.gpus for stage in stages), default=0)
    if most <= 0 or has_room(snapshot, [stage.scale.current for stage in stages], most):
        return False
    size, count = gpu_room(snapshot)
    if not count:
        return False
    held = largest = 0.0
    for stage in stages:
        if stage.gpus > 0:
            weight = gpu_weight(stage, size)
            largest = max(largest, weight)
            held += weight * stage.scale.current
    return held + largest > count * (1 + 1e-9)

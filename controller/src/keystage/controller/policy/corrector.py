"""The corrector: what every stage of a pipeline needs (QUART section 5.1, corrected).

Before it: snapshot and memory. After it: smoothing, compensation, clamps. Demand is feed-forward
(`policy.demand`) times the trim (`policy.trim`), and never below what the backlog asks. Missing or
stale data holds the present number: never zero, never an exception.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec

from keystage.controller.domain.snapshot import FunctionView, PipelineView, StageView
from keystage.controller.domain.state import PolicyState, StageState
from keystage.controller.maths.estimator import Estimates, estimate, is_number
from keystage.controller.policy import demand
from keystage.controller.policy.demand import Load
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings
from keystage.controller.policy.shares import entry_wait_s, stage_shares_s
from keystage.controller.policy.trim import trim

MOST_SERVERS = 4096
"""Slots per replica believed; more is a garbled statistic."""


def correct(settings: PolicySettings, view: PipelineView, state: PolicyState, at_s: float) -> list[Plan]:
    """Estimates, then plans every stage of one pipeline, in stage order."""
    plans = [_estimated(settings, stage, state, at_s, view) for stage in view.stages]
    held = next((p.reason for p in plans if p.is_held), "")
    if held:
        if view.execution == "looping":  # sessions wait at entry for every stage, also to wake one at zero
            queue = plans[0].known.queue
            plans = [
                dataclasses.replace(p, known=msgspec.structs.replace(p.known, queue=queue)) for p in plans
            ]
        return [p if p.is_held else dataclasses.replace(p, is_held=True, reason=held) for p in plans]
    if view.execution == "looping":
        return _looping(settings, view, plans, state, at_s)
    services_s = [p.known.service_s or 0.0 for p in plans]
    shares_s = stage_shares_s(settings, view.slo, services_s)
    needed: list[Plan] = []
    upstream = 0.0  # what waits at a stage comes to the next ones: they are made ready with it
    for stage, plan, share_s in zip(view.stages, plans, shares_s, strict=True):
        load = _single_pass_load(settings, plan.known, share_s)
        load = dataclasses.replace(load, backlog=load.backlog + upstream)
        drain_s = settings.drain_ratio * sum(shares_s)
        needed.append(_needed(settings, stage, plan, load, state, at_s, share_s, drain_s))
        upstream = load.backlog
    return needed


def _estimated(
    settings: PolicySettings, stage: StageView, state: PolicyState, at_s: float, view: PipelineView
) -> Plan:
    """One stage with its estimates; held when they cannot be used."""
    memory = state.stages.get(stage.scale.function)
    if memory is None:  # a function nobody decided on before is new: there is no leader to continue
        memory = StageState(found=0.0 if stage.scale.desired is None else None)
    plan = Plan(
        scale=stage.scale,
        wanted=stage.scale.current,
        corrected=stage.scale.current,
        reason="",
        is_stage=True,
        is_session=view.execution == "looping",
        pipeline=view.pipeline,
        stage=stage.stage,
        memory=memory,
    )
    if view.missing:
        return dataclasses.replace(plan, is_held=True, reason=f"hold: {view.missing}")
    known, estimator = estimate(
        settings.estimator, memory.estimator, at_s, stage.routers, stage.workers, stage.profile_s
    )
    plan = dataclasses.replace(plan, known=known, memory=msgspec.structs.replace(memory, estimator=estimator))
    reason = _gap(known, view.execution, stage.stage)
    if reason:
        return dataclasses.replace(plan, is_held=True, reason=f"hold: {reason}")
    return plan


def _gap(known: Estimates, execution: str, stage: int) -> str:
    """What is missing for a decision, empty when nothing is."""
    if known.invalid:
        return known.invalid
    if execution == "looping" and known.slots is None:
        return "no ready worker tells its slots"
    if execution == "looping" and stage != 0:
        return ""  # sessions are counted at entry only
    if known.service_s is None or not known.capacity_rps:
        return "no service time known yet"
    if known.arrival_rps is None:
        return "no arrival rate known yet"
    return ""


def _single_pass_load(settings: PolicySettings, known: Estimates, share_s: float) -> Load:
    assert known.capacity_rps is not None
    assert known.service_s is not None
    assert known.arrival_rps is not None
    return Load(
        arrival_rps=known.arrival_rps,
        arrival_scv=known.arrival_scv,
        service_s=1 / known.capacity_rps,
        service_scv=known.service_scv,
        servers=1,
        backlog=known.queue,
        wait_s=max(share_s - known.service_s, settings.least_wait_ratio * known.service_s),
    )


def _needed(
    settings: PolicySettings,
    stage: StageView,
    plan: Plan,
    load: Load,
    state: PolicyState,
    at_s: float,
    share_s: float,
    drain_s: float,
) -> Plan:
    """Feed-forward, trim and backlog of one stage."""
    scale, known = plan.scale, plan.known
    most = MOST_REPLICAS  # bounds come later, with their reasons
    if not (
        0 <= load.arrival_rps * load.service_s < math.inf and load.service_s > 0 and load.replica_rps > 0
    ):
        return dataclasses.replace(plan, is_held=True, reason="hold: estimated load is out of range")
    previous = state.stages.get(scale.function, StageState()).estimator.at_s
    dt_s = min(max(0.0, at_s - previous), settings.estimator.slow_s) if previous is not None else 0.0
    start_s = stage.start_s if is_number(stage.start_s) and stage.start_s >= 0 else settings.start_s
    drain_s = max(settings.drain_s, drain_s, settings.drain_start_ratio * start_s)
    steady = dataclasses.replace(load, arrival_rps=known.arrival_slow_rps or load.arrival_rps)
    model_s = demand.model_sojourn_s(steady, scale.ready)
    output, memory = trim(settings, plan.memory, scale, known, model_s, at_s, dt_s)
    corrected = dataclasses.replace(steady, wait_s=steady.wait_s * math.exp(-output))
    forward, memory = _continued(settings, demand.for_wait(corrected, most), scale, memory, dt_s)
    backlog = demand.for_backlog(load, scale.ready, scale.starting, at_s, start_s, drain_s, most)
    wanted = min(most, max(forward, backlog))
    reason = f"backlog of {load.backlog:.0f}" if backlog > forward else f"waits within {share_s:.3g} s"
    return dataclasses.replace(
        plan,
        wanted=wanted,
        corrected=wanted,
        reason=reason,
        memory=memory,
        share_s=share_s,
        model_s=model_s if math.isfinite(model_s) else None,
        trim=output,
    )


def _continued(
    settings: PolicySettings, forward: int, scale: FunctionView, memory: StageState, dt_s: float
) -> tuple[int, StageState]:
    """Goes on from the replicas a new leader found: the difference to the feed-forward fades."""
    found = memory.found
    if found is None:
        found = math.log(max(1, scale.current) / forward)
    else:
        found *= math.exp(-dt_s / settings.forget_s)
    memory = msgspec.structs.replace(memory, found=found)
    return max(1, math.floor(forward * math.exp(found) + 0.5)), memory


def _looping(
    settings: PolicySettings, view: PipelineView, plans: list[Plan], state: PolicyState, at_s: float
) -> list[Plan]:
    """Customers are sessions, servers are slots, service is a session's residence, arrivals are at entry.

    Slots that are short are added at the stages that have too few. Where the busiest stage is
    compute-bound more sessions would only slow each other, so that stage alone grows.
    """
    entry = plans[0].known
    if entry.service_s is None or entry.arrival_rps is None:
        return [dataclasses.replace(p, is_held=True, reason="hold: entry is not measured") for p in plans]
    wait_s = entry_wait_s(settings, view.slo)
    peak = max(p.known.busy_ratio or 0.0 for p in plans)
    needed = []
    for stage, plan in zip(view.stages, plans, strict=True):
        known = msgspec.structs.replace(
            entry, slots=plan.known.slots, slot_ratio=plan.known.slot_ratio, busy_ratio=plan.known.busy_ratio
        )
        load = Load(
            arrival_rps=entry.arrival_rps,
            arrival_scv=entry.arrival_scv,
            service_s=entry.service_s,
            service_scv=entry.service_scv,
            servers=max(1, min(MOST_SERVERS, math.floor(plan.known.slots or 1))),
            backlog=entry.queue,
            wait_s=wait_s,
        )
        plan_k = dataclasses.replace(plan, known=known)
        own = _needed(settings, stage, plan_k, load, state, at_s, wait_s, wait_s)
        is_key = (known.busy_ratio or 0.0) >= peak
        if peak >= settings.busy_ratio and not is_key and own.wanted > own.scale.current:
            now = own.scale.current
            own = dataclasses.replace(own, wanted=now, corrected=now, reason="another stage is the key stage")
        needed.append(own)
    return needed

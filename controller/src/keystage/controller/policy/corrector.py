"""The corrector: what every stage of a pipeline needs (QUART section 5.1, corrected).

Before it: snapshot and memory. After it: smoothing, compensation, clamps. Demand is feed-forward
(`policy.demand`) times the trim (`policy.trim`), and never below what the backlog asks. Missing or
stale data holds the present number: never zero, never an exception.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from keystage.controller.domain.snapshot import FunctionView, PipelineView, StageView
from keystage.controller.domain.state import PolicyState, StageState
from keystage.controller.maths.estimator import LEAST_S, MOST_RPS, MOST_S, Estimates, estimate, is_number
from keystage.controller.policy import demand
from keystage.controller.policy.advice import advised, is_deferred, without_trim
from keystage.controller.policy.demand import Load
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.service import Service, service
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings
from keystage.controller.policy.shares import (
    Predecessors,
    deadline_s,
    entry_wait_s,
    longest_s,
    predecessors,
    stage_shares_s,
    visits,
    waiting_before,
)
from keystage.controller.policy.trim import trim


def correct(settings: PolicySettings, view: PipelineView, state: PolicyState, at_s: float) -> list[Plan]:
    """Estimates, then plans every stage of one pipeline, in stage order."""
    plans = [_estimated(settings, stage, state, at_s, view) for stage in view.stages]
    if not plans:
        return []
    held = next((p.reason for p in plans if p.is_held), _objective_gap(view))
    if held:
        return [p if p.is_held else replace(p, is_held=True, reason=held) for p in plans]
    order = state.published.get(view.pipeline, ())
    efforts = [_effort(settings, order, plan.stage, len(plans)) for plan in plans]
    if view.execution == "looping":
        return _looping(settings, view, plans, state, at_s, efforts)
    is_advised = is_deferred(view)
    if is_advised:
        settings = without_trim(settings)
    graph = predecessors(view.stages)
    services = [service(settings, s.batch, p.known) for s, p in zip(view.stages, plans, strict=True)]
    alone_s = [one.alone_s for one in services]
    passes = _passes(view, plans, graph)
    total_s = [one_s * times for one_s, times in zip(alone_s, passes, strict=True)]
    longest = longest_s(graph, total_s)
    whole_s = deadline_s(settings, view.slo, longest)
    of_all_s = stage_shares_s(whole_s, longest, total_s)
    shares_s = [share_s / times for share_s, times in zip(of_all_s, passes, strict=True)]
    batches = [one.batch_within(share_s) for one, share_s in zip(services, shares_s, strict=True)]
    waits_s = [  # what a share leaves for waiting beside a batch of b*
        max(share_s - one.batch_s(batch), settings.least_wait_ratio * one.alone_s)
        for one, share_s, batch in zip(services, shares_s, batches, strict=True)
    ]
    entries = [p.known for p, before in zip(plans, graph, strict=True) if not before]
    rate_rps = max(k.arrival_slow_rps or k.arrival_rps or 0.0 for k in entries)
    scv = max(k.arrival_scv for k in entries)
    chain_rps = demand.pipeline_rps(rate_rps, scv, settings.chain_wait_ratio * sum(waits_s))
    waiting = waiting_before(graph, [p.known.queue for p in plans])
    drain_s = settings.drain_ratio * whole_s
    needed: list[Plan] = []
    for k, (stage, plan, one) in enumerate(zip(view.stages, plans, services, strict=True)):
        # The rate is the entry's: whatever comes in comes here, and what comes faster than that is a
        # backlog of the stages in front, which counts as such.
        known, effort, wait_s = plan.known, efforts[k], waits_s[k]
        stage_scv = min(known.arrival_scv, settings.most_stage_scv)
        steady = Load(
            rate_rps * passes[k] * effort, stage_scv, 1 / one.rps(batches[k]), known.service_scv, 1, 0.0,
            wait_s,
        )  # fmt: skip
        full = Load(
            rate_rps * passes[k] * effort, stage_scv, 1 / one.rps(one.most), known.service_scv, 1,
            waiting[k] * passes[k] * effort, wait_s,
        )  # fmt: skip
        least = math.ceil(min(MOST_REPLICAS, chain_rps * passes[k] * effort * steady.service_s * (1 - 1e-9)))
        own_s = known.service_s or one.alone_s
        share_s = shares_s[k]
        needed.append(
            _needed(settings, stage, plan, steady, full, own_s, state, at_s, share_s, drain_s, least, one)
        )
    if not is_advised:
        return needed
    return [advised(settings, s, plan, at_s) for s, plan in zip(view.stages, needed, strict=True)]


def _passes(view: PipelineView, plans: Sequence[Plan], graph: Predecessors) -> list[float]:
    """How often a request passes each stage: once, but for the modules of a stream program."""
    if view.execution != "program":
        return [1.0] * len(plans)
    rates = [plan.known.arrival_slow_rps or plan.known.arrival_rps for plan in plans]
    return visits([rate for rate, before in zip(rates, graph, strict=True) if not before], rates)


def _effort(settings: PolicySettings, order: tuple[int, ...], stage: int, count: int) -> float:
    """Factor on a stage's demand.

    Away from 1 stages differ a little, key stages have the most, so that not all of them round up at the
    same effort and the sum can be set finely.
    """
    if settings.effort == 1:
        return 1.0
    place = order.index(stage) if stage in order else stage
    return float(settings.effort ** (1.1 - 0.2 * (place + 0.5) / count))


def _estimated(
    settings: PolicySettings, stage: StageView, state: PolicyState, at_s: float, view: PipelineView
) -> Plan:
    """One stage with its estimates; held when they cannot be used."""
    scale = stage.scale
    memory = state.stages.get(scale.function)
    if memory is None:  # a function nobody decided on before is new: there is no leader to continue
        memory = StageState(found=0.0 if scale.desired is None else None)
    known, reason = Estimates(), ""
    if view.missing:
        reason = f"hold: {view.missing}"
    else:
        known, estimator = estimate(
            settings.estimator, memory.estimator, at_s, stage.routers, stage.workers, stage.profile_s
        )
        memory = replace(memory, estimator=estimator)
        gap = _gap(known, view.execution, stage.stage)
        reason = f"hold: {gap}" if gap else ""
    return Plan(
        scale=scale,
        wanted=scale.current,
        corrected=scale.current,
        reason=reason,
        is_stage=True,
        is_session=view.execution == "looping",
        pipeline=view.pipeline,
        stage=stage.stage,
        is_held=bool(reason),
        memory=memory,
        known=known,
    )


def _gap(known: Estimates, execution: str, stage: int) -> str:
    """What is missing for a decision, empty when nothing is."""
    if known.invalid:
        return known.invalid
    if execution == "looping" and known.slots is None:
        return f"stage {stage} has no ready worker that tells its slots"
    if execution == "looping" and stage != 0:
        return ""  # sessions are counted at entry only
    if known.service_s is None or not known.capacity_rps:
        return "no service time known yet"
    if not LEAST_S <= known.service_s <= MOST_S:
        return f"a service time of {known.service_s:.3g} s is not believed ({LEAST_S:g} to {MOST_S:g} s)"
    if not 1 / MOST_RPS <= known.capacity_rps <= MOST_RPS:
        return f"{known.capacity_rps:.3g} items/s of one worker are not believed (at most {MOST_RPS:g})"
    if known.arrival_rps is None:
        return "no arrival rate known yet"
    fastest = max(known.arrival_rps, known.arrival_slow_rps or 0.0)
    if not fastest <= MOST_RPS:
        return f"{fastest:.3g} arrivals/s are not believed (at most {MOST_RPS:g})"
    return ""


def _objective_gap(view: PipelineView) -> str:
    """Why the pipeline's objective cannot be used, empty when it can; one not stated has a default."""
    name = "ttft_s" if view.execution == "looping" else "deadline_s"
    objective_s = view.slo.ttft_s if view.execution == "looping" else view.slo.deadline_s
    if is_number(objective_s) and objective_s > MOST_S:
        return f"hold: {name} of {objective_s:.3g} s is not believed (at most {MOST_S:g} s)"
    return ""


def _needed(
    settings: PolicySettings,
    stage: StageView,
    plan: Plan,
    steady: Load,
    full: Load,
    own_s: float,
    state: PolicyState,
    at_s: float,
    share_s: float,
    drain_s: float,
    least: int = 1,
    serving: Service | None = None,
) -> Plan:
    """Feed-forward, trim and backlog of one stage.

    What the wait under `steady` asks for, at least `least`, is the feed-forward; what waits, in `full`, shall
    be gone within `drain_s`. An item is in service for `own_s`.
    """
    scale, known = plan.scale, plan.known
    most = MOST_REPLICAS  # bounds come later, with their reasons
    if not (_is_sane(steady) and _is_sane(full)):
        return replace(plan, is_held=True, reason="hold: estimated load is out of range")
    before = state.stages.get(scale.function)
    previous_s = before.estimator.at_s if before is not None else None
    if before is not None and plan.memory.estimator is before.estimator:
        previous_s = None  # nothing new was taken in
    dt_s = min(max(0.0, at_s - previous_s), settings.estimator.slow_s) if previous_s is not None else 0.0
    start_s = expected_start_s(settings, stage)
    drain_s = max(settings.drain_s, drain_s, settings.drain_start_ratio * start_s)
    model_s = math.inf  # of interest only where something was served to compare with
    if known.tick_services > 0:
        model_s = demand.model_wait_s(steady, scale.ready) + own_s
    output, memory = trim(settings, plan.memory, scale, known, model_s, at_s, dt_s)
    corrected = replace(steady, wait_s=steady.wait_s * math.exp(-output)) if output else steady
    forward = modelled = max(least, demand.for_wait(corrected, most))
    if output > 0:
        modelled = max(least, demand.for_wait(steady, most))
    forward, memory = _continued(settings, forward, scale, memory, dt_s)
    backlog = demand.for_backlog(full, scale.ready, scale.starting, at_s, start_s, drain_s, most)
    wanted = min(most, max(forward, backlog))
    reason = f"backlog of {full.backlog:.0f}" if backlog > forward else f"waits within {share_s:.3g} s"
    return replace(
        plan,
        wanted=wanted,
        corrected=wanted,
        modelled=min(wanted, max(modelled, backlog)),
        reason=reason,
        memory=memory,
        share_s=share_s,
        model_s=model_s if math.isfinite(model_s) else None,
        trim=output,
        horizon_s=start_s + drain_s,
        serving=serving,
    )


def _is_sane(load: Load) -> bool:
    return 0 <= load.arrival_rps * load.service_s < math.inf and load.service_s > 0 and load.replica_rps > 0


def expected_start_s(settings: PolicySettings, stage: StageView) -> float:
    """Seconds until a replica asked for now serves: measured, else the best source's, else a guess."""
    if is_number(stage.start_s) and 0 <= stage.start_s <= MOST_S:
        return stage.start_s
    if stage.starts is not None:
        starts = stage.starts
        sources = (starts.gpu_s, starts.memory_s, starts.disk_s, starts.remote_s)
        told = [s for s in sources if is_number(s) and 0 <= s <= MOST_S]
        if told:
            return min(told)
    return settings.start_s


def _continued(
    settings: PolicySettings, forward: int, scale: FunctionView, memory: StageState, dt_s: float
) -> tuple[int, StageState]:
    """Goes on from the replicas a new leader found: the difference to the feed-forward fades."""
    found = memory.found
    if found is None:
        found = math.log(max(1, scale.current) / forward)
    elif found:
        found *= math.exp(-dt_s / settings.forget_s)
    if found == memory.found == 0:
        return forward, memory
    memory = replace(memory, found=found if abs(found) > 1e-3 else 0.0)
    return max(1, math.floor(forward * math.exp(found) + 0.5)), memory


def _looping(
    settings: PolicySettings,
    view: PipelineView,
    plans: list[Plan],
    state: PolicyState,
    at_s: float,
    efforts: list[float],
) -> list[Plan]:
    """Customers are sessions, servers are slots, service is a session's residence, arrivals are at entry.

    Slots that are short are added at the stages that have too few. Where the busiest stage is
    compute-bound more sessions would only slow each other, so that stage alone grows.
    """
    entry = plans[0].known
    if entry.service_s is None or entry.arrival_rps is None:
        return [replace(p, is_held=True, reason="hold: entry is not measured") for p in plans]
    wait_s = entry_wait_s(settings, view.slo)
    peak = max(p.known.busy_ratio or 0.0 for p in plans)
    needed = []
    for stage, plan, effort in zip(view.stages, plans, efforts, strict=True):
        known = replace(
            entry, slots=plan.known.slots, slot_ratio=plan.known.slot_ratio, busy_ratio=plan.known.busy_ratio
        )
        full = Load(
            arrival_rps=entry.arrival_rps * effort,
            arrival_scv=entry.arrival_scv,
            service_s=entry.service_s,
            service_scv=entry.service_scv,
            servers=max(1, math.floor(plan.known.slots or 1)),
            backlog=entry.queue * effort,
            wait_s=wait_s,
        )
        steady = replace(full, arrival_rps=(entry.arrival_slow_rps or entry.arrival_rps) * effort)
        own = _needed(
            settings,
            stage,
            replace(plan, known=known),
            steady,
            full,
            entry.service_s,
            state,
            at_s,
            wait_s,
            wait_s,
        )
        is_key = (known.busy_ratio or 0.0) >= peak
        if peak >= settings.busy_ratio and not is_key and own.wanted > own.scale.current:
            now = own.scale.current
            own = replace(own, wanted=now, corrected=now, reason="another stage is the key stage")
        needed.append(own)
    return needed

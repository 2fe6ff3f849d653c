"""From final plans to actions, reports and memory: the last step of `decide`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    KeyStage,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
    StageReport,
)
from keystage.controller.domain.snapshot import PipelineView
from keystage.controller.domain.state import PlainState, PolicyState, StageState
from keystage.controller.policy.plan import Plan

RESTING = "nothing changed"
"""The reason of a pipeline that is passed over."""


def difference(plan: Plan, at_s: float) -> list[Action]:
    """What has to be stated anew for one function."""
    scale = plan.scale
    actions: list[Action] = []
    if scale.desired != plan.wanted:
        actions.append(SetReplicas(scale.function, plan.wanted, plan.sites, plan.victims))
    if plan.cores is not None:
        actions.append(SetCpu(scale.function, plan.cores))
    if scale.override is not None and not plan.is_override:  # expired, or zero while a request waits
        actions.append(LiftOverride(scale.function))
    if scale.wake and scale.ready > 0 and plan.wanted > 0:
        actions.append(ClearWake(scale.function))
    return actions


def publication(
    pipeline: str, plans: Sequence[Plan], before: tuple[int, ...]
) -> tuple[list[Action], tuple[int, ...]]:
    """The key-stage list if its order is new, and the order in force."""
    if not plans or any(p.is_held for p in plans):
        return [], before
    ranked = sorted(plans, key=lambda p: p.rank)
    order = tuple(p.stage for p in ranked)
    if order == before:
        return [], before
    ranking = tuple(KeyStage(p.stage, round(p.score, 4)) for p in ranked)
    return [PublishKeyStages(pipeline, ranking)], order


def at_rest(view: PipelineView, state: PolicyState, before: tuple[int, ...]) -> list[Plan]:
    """Plans of a pipeline that is passed over: everything stays as it is."""
    place = {stage: i for i, stage in enumerate(before)}
    return [
        Plan(
            scale=stage.scale,
            wanted=stage.scale.current,
            corrected=stage.scale.current,
            reason=RESTING,
            is_stage=True,
            is_resting=True,
            pipeline=view.pipeline,
            stage=stage.stage,
            rank=place.get(stage.stage, len(place)),
            memory=state.stages[stage.scale.function],
        )
        for stage in view.stages
    ]


def remembered(
    plans: Sequence[Plan], state: PolicyState, at_s: float
) -> tuple[dict[str, StageState], dict[str, float]]:
    """The memory of every stage, and when the pipelines that have nothing left to do were looked at."""
    stages: dict[str, StageState] = {}
    settled: dict[str, float] = {}
    unsettled: set[str] = set()
    for plan in plans:
        if not plan.is_stage:
            continue
        if plan.is_resting and not plan.is_cut:
            stages[plan.scale.function] = plan.memory
            settled[plan.pipeline] = state.settled[plan.pipeline]
            continue
        stages[plan.scale.function] = _memory(plan, at_s)
        settled[plan.pipeline] = at_s
        if plan.is_held or plan.is_cut:
            unsettled.add(plan.pipeline)
    for pipeline in unsettled:
        del settled[pipeline]
    return stages, settled


def remembered_functions(plans: Sequence[Plan]) -> dict[str, PlainState]:
    """The memory of every plain function whose load is told."""
    return {plan.scale.function: plan.plain for plan in plans if plan.plain is not None}


def _memory(plan: Plan, at_s: float) -> StageState:
    """The stage's memory, with the time of a change of its number (by anybody)."""
    memory = plan.memory
    is_first = memory.desired is None and plan.scale.desired == plan.wanted
    if memory.desired == plan.wanted:
        return memory
    acted_at_s = memory.acted_at_s if is_first else at_s
    return msgspec.structs.replace(memory, desired=plan.wanted, acted_at_s=acted_at_s)


def report(plan: Plan) -> StageReport:
    """The numbers behind a decision."""
    if plan.is_resting:  # nobody looked at its statistics
        return StageReport(
            function=plan.scale.function, replicas=plan.wanted, wanted=plan.corrected, reason=plan.reason
        )
    known = plan.known
    return StageReport(
        function=plan.scale.function,
        replicas=plan.wanted,
        wanted=plan.corrected,
        reason=plan.reason,
        arrival_rps=known.arrival_rps,
        arrival_scv=known.arrival_scv,
        service_s=known.service_s,
        utilisation_ratio=_utilisation(plan),
        sojourn_s=known.sojourn_s,
        model_s=plan.model_s,
        share_s=plan.share_s,
        queue=known.queue,
        trim=plan.trim,
    )


def _utilisation(plan: Plan) -> float | None:
    """Arrivals over what the ready replicas can serve.

    Looping: the busy part of the ready workers' time. Their capacity is known in rows, of which a session has
    as many as it has tokens, so arrivals of sessions say nothing over it.
    """
    known = plan.known
    if plan.is_session:
        return min(1.0, known.busy_ratio) if known.busy_ratio is not None else None
    capacity_rps = (known.capacity_rps or 0.0) * plan.scale.ready
    return known.arrival_rps / capacity_rps if known.arrival_rps is not None and capacity_rps else None

"""The policy: one pure, total function from what is seen to what shall be done.

Before it: `Platform.observe`. After it: `Platform.apply`, and the decisions log. Time comes in with
the snapshot. Whatever the snapshot holds, an answer comes out: missing or stale data holds the
present number. Each step takes and returns plans, so a step more is a line more. Pipelines that show
nothing new are passed over (`policy.quiet`): they keep numbers and memory.
"""

from __future__ import annotations

import math

from keystage.controller.domain.decision import Action, Decision
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PlainState, PolicyState
from keystage.controller.policy import outcome
from keystage.controller.policy.clamp import clamp, deal
from keystage.controller.policy.compensator import compensate
from keystage.controller.policy.corrector import correct
from keystage.controller.policy.damping import damp
from keystage.controller.policy.idle import idle
from keystage.controller.policy.placement import place
from keystage.controller.policy.plain import plain
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.quiet import looks
from keystage.controller.policy.ranking import rank
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.smoother import smooth

UNSEEN = PlainState()


def decide(settings: PolicySettings, snapshot: Snapshot, state: PolicyState) -> Decision:
    """Estimate, correct, rank, clamp, damp, smooth, compensate, deal, place, diff."""
    at_s = snapshot.at_s
    if not math.isfinite(at_s):
        return Decision(actions=(), state=state, reports=())
    plans: list[Plan] = []
    publish: list[Action] = []
    published: dict[str, tuple[int, ...]] = {}
    is_due = looks(settings, snapshot, state)
    for view, is_looked_at in zip(snapshot.pipelines, is_due, strict=True):
        before = state.published.get(view.pipeline, ())
        if not is_looked_at:
            published[view.pipeline] = before
            plans += outcome.at_rest(view, state, before)
            continue
        stages = correct(settings, view, state, at_s)
        stages = rank(settings, stages, view.execution, before)
        stages = [clamp(plan, at_s) for plan in idle(settings, stages, at_s)]
        stages = damp(settings, view, stages, at_s)
        stages = smooth(settings, view, stages)
        stages = compensate(settings, view, stages)
        action, published[view.pipeline] = outcome.publication(view.pipeline, stages, before)
        publish += action
        plans += stages
    before_functions = state.functions
    plans += [
        clamp(plain(settings, scale, before_functions.get(scale.function, UNSEEN), at_s), at_s)
        for scale in snapshot.functions
    ]
    plans = deal(plans, snapshot)
    plans, placement = place(settings, snapshot, plans, state, published)
    planned = [plan for plan in plans if plan.is_cut or not plan.is_resting]
    actions = [action for plan in planned for action in outcome.difference(plan, at_s)]
    stages_after, settled = outcome.remembered(plans, state, at_s)
    return Decision(
        actions=(*actions, *publish),
        state=PolicyState(
            stages=stages_after,
            published=published,
            settled=settled,
            is_contended=placement is not None and placement.regime == "contended",
            functions=outcome.remembered_functions(plans),
        ),
        reports=tuple([outcome.report(plan) for plan in plans]),
        placement=placement,
    )

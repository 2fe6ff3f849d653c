"""The policy: one pure, total function from what is seen to what shall be done.

Before it: `Platform.observe`. After it: `Platform.apply`, and the decisions log. Time comes in with
the snapshot. Whatever the snapshot holds, an answer comes out: missing or stale data holds the
present number. Each step takes and returns plans, so a step more is a line more.
"""

from __future__ import annotations

import math

from keystage.controller.domain.decision import Action, Decision
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy import outcome
from keystage.controller.policy.clamp import clamp, deal
from keystage.controller.policy.corrector import correct
from keystage.controller.policy.damping import damp
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.ranking import rank
from keystage.controller.policy.settings import PolicySettings


def decide(settings: PolicySettings, snapshot: Snapshot, state: PolicyState) -> Decision:
    """Estimate, correct, clamp, damp, deal, diff."""
    at_s = snapshot.at_s
    if not math.isfinite(at_s):
        return Decision(actions=(), state=state, reports=())
    plans: list[Plan] = []
    publish: list[Action] = []
    published: dict[str, tuple[int, ...]] = {}
    for view in snapshot.pipelines:
        before = state.published.get(view.pipeline, ())
        stages = correct(settings, view, state, at_s)
        stages = rank(settings, stages, view.execution, before)
        # Smoother and CPU compensator act here: on corrected, ranked numbers, before any bound.
        stages = [clamp(plan, at_s) for plan in stages]
        stages = [
            damp(settings, plan, stage.start_s, view.execution, at_s)
            for plan, stage in zip(stages, view.stages, strict=True)
        ]
        action, published[view.pipeline] = outcome.publication(view.pipeline, stages, before)
        publish += action
        plans += stages
    plans += [clamp(outcome.plain(scale), at_s) for scale in snapshot.functions]
    plans = deal(plans, snapshot.budget_replicas)
    # Placement acts here: numbers are final, nodes are chosen.
    memories = {p.scale.function: outcome.remembered(p, at_s) for p in plans if p.is_stage}
    actions = [action for plan in plans for action in outcome.difference(plan, at_s)]
    return Decision(
        actions=(*actions, *publish),
        state=PolicyState(stages=memories, published=published),
        reports=tuple(outcome.report(plan) for plan in plans),
    )

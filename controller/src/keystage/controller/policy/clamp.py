"""Bounds and intents: labels, machine, people, budget.

Before it: wanted numbers. After it: damping and diff. A person's override wins over the policy until
it expires; bounds win over both, but an override of zero is kept: it is how people stop a function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.controller.policy.plan import Plan


def clamp(plan: Plan, at_s: float) -> Plan:
    """Applies override, wake, labels and the machine's cap to one function."""
    scale, wanted, reason = plan.scale, plan.wanted, plan.reason
    override = scale.override
    is_waking = scale.wake or (plan.is_stage and plan.known.queue > 0)
    is_asked = override is not None and at_s < override.expires_at_s
    if override is not None and is_asked and override.replicas <= 0:
        if not is_waking:
            return dataclasses.replace(plan, wanted=0, is_override=True, reason="override: 0")
        is_asked = False
    if override is not None and is_asked:
        wanted, reason = override.replicas, f"override: {override.replicas}"
    if is_waking and wanted < 1:
        wanted, reason = 1, "a request waits"
    highest = plan.highest
    if wanted > highest:
        by_cap = scale.cap is not None and highest < scale.max_replicas
        reason += f"; at most {highest}: {scale.cap_reason}" if by_cap else f"; at most {highest} by label"
    elif wanted < plan.lowest:
        reason += f"; at least {plan.lowest}"
    return dataclasses.replace(
        plan, wanted=max(plan.lowest, min(highest, wanted)), is_override=is_asked, reason=reason
    )


def deal(plans: Sequence[Plan], budget: int | None) -> list[Plan]:
    """Deals the budget of stage replicas (R_total): minimums first, then people, then the key stages.

    Minimums are kept even if they alone exceed the budget: they are somebody's promise.
    Ranks of several pipelines are dealt in turn (all first ones, then all second ones).
    """
    stages = [i for i, p in enumerate(plans) if p.is_stage]
    if budget is None or sum(plans[i].wanted for i in stages) <= budget:
        return list(plans)
    given = {i: min(plans[i].wanted, plans[i].lowest) for i in stages}
    left = max(0, budget - sum(given.values()))
    for i in sorted(stages, key=lambda i: (not plans[i].is_override, plans[i].rank, -plans[i].score, i)):
        more = min(left, plans[i].wanted - given[i])
        given[i] += more
        left -= more
    return [
        dataclasses.replace(
            p, wanted=given[i], reason=f"{p.reason}; {given[i]} of {p.wanted} by budget {budget}"
        )
        if i in given and given[i] < p.wanted
        else p
        for i, p in enumerate(plans)
    ]

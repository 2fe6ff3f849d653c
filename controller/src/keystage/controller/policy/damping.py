"""Scale-down, carefully: one replica at a time, after a while, if the rest carries the load.

Before it: clamped numbers. After it: the budget. Replicas that are still starting go first and may
go at once: they carry nothing. Growth, people and bounds pass undamped.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keystage.controller.domain.snapshot import PipelineView
from keystage.controller.policy.corrector import expected_start_s
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings


def damp(settings: PolicySettings, view: PipelineView, plans: Sequence[Plan], at_s: float) -> list[Plan]:
    """Keeps or lets go of one replica of each stage of a pipeline."""
    return [
        _damped(settings, plan, expected_start_s(settings, stage), view.execution, at_s)
        for plan, stage in zip(plans, view.stages, strict=True)
    ]


def _damped(settings: PolicySettings, plan: Plan, start_s: float, execution: str, at_s: float) -> Plan:
    current, memory = plan.scale.current, plan.memory
    if plan.is_override or plan.is_held or plan.is_idle or plan.wanted >= current:
        if memory.low_since_s is None and memory.low_peak == 0:
            return plan
        memory = msgspec.structs.replace(memory, low_since_s=None, low_peak=0)
        return msgspec.structs.replace(plan, memory=memory)
    if current > plan.highest:  # bounds are not damped
        return msgspec.structs.replace(plan, wanted=plan.highest)
    since_s = memory.low_since_s
    seen = memory.low_peak
    if since_s is None or since_s > at_s or seen >= current:  # a peak of before the last change is past
        since_s, seen = at_s, 0
    peak = max(seen, plan.wanted)
    memory = msgspec.structs.replace(memory, low_since_s=since_s, low_peak=peak)
    hold_s = max(settings.hold_s, settings.hold_start_ratio * start_s)
    unready = max(0, current - plan.scale.ready)
    is_due = at_s - since_s >= hold_s
    if not is_due:
        reason = f"{plan.reason}; fewer would do, held for {hold_s:.2g} s"
        return msgspec.structs.replace(plan, wanted=current, memory=memory, reason=reason)
    if unready == 0 and not is_carried(settings, plan, execution):
        reason = f"{plan.reason}; {current - 1} would be above {settings.carry_ratio:.0%} busy"
        return msgspec.structs.replace(plan, wanted=current, memory=memory, reason=reason)
    wanted = max(peak, current - unready) if unready else current - 1
    next_s = at_s - (1 - settings.hold_next_ratio) * hold_s
    memory = msgspec.structs.replace(memory, low_since_s=next_s, low_peak=0)
    return msgspec.structs.replace(
        plan, wanted=wanted, memory=memory, reason=f"{plan.reason}; surplus given back"
    )


def is_carried(settings: PolicySettings, plan: Plan, execution: str) -> bool:
    """Whether one replica fewer stays below the utilisation bound by the long-window load.

    Nor may it come back at the next chance queue: one is asked for when more waits than the rest works off
    in start plus drain time H, n = (c mu - lambda) H items, and in heavy traffic (Kingman)

        P(queue > n) = exp(-2 n (1 - rho) / (ca2 + cs2))

    which has to be below exp(-carry_nepers).
    """
    known = plan.known
    rest = plan.scale.current - 1
    if rest < 1:
        return False
    if execution == "looping":
        sessions = (known.arrival_slow_rps or 0.0) * (known.service_s or 0.0)
        by_slots = sessions / (rest * (known.slots or 1.0))
        by_compute = (known.busy_ratio or 0.0) * plan.scale.ready / rest
        return max(by_slots, by_compute) < settings.carry_ratio
    if not known.capacity_rps:
        return False
    rate_rps = known.arrival_slow_rps or 0.0
    spare_rps = rest * known.capacity_rps - rate_rps
    ratio = rate_rps / (rest * known.capacity_rps)
    if ratio >= settings.carry_ratio:
        return False
    scv = min(known.arrival_scv, settings.most_stage_scv) + min(known.service_scv, 1.0)
    return spare_rps * plan.horizon_s * 2 * (1 - ratio) >= settings.carry_nepers * scv

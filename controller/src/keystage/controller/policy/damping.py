"""Scale-down, carefully: one replica at a time, after a while, if the rest carries the load.

Before it: clamped numbers. After it: the budget. Replicas that are still starting go first and may
go at once: they carry nothing. Growth, people and bounds pass undamped.
"""

from __future__ import annotations

import dataclasses

import msgspec

from keystage.controller.maths.estimator import is_number
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings


def damp(settings: PolicySettings, plan: Plan, start_s: float | None, execution: str, at_s: float) -> Plan:
    """Keeps or lets go of one replica of a stage."""
    current, memory = plan.scale.current, plan.memory
    if plan.is_override or plan.is_held or plan.wanted >= current:
        memory = msgspec.structs.replace(memory, low_since_s=None, low_peak=0)
        return dataclasses.replace(plan, memory=memory)
    if current > plan.highest:  # bounds are not damped
        return dataclasses.replace(plan, wanted=plan.highest)
    since_s = memory.low_since_s
    seen = memory.low_peak
    if since_s is None or since_s > at_s or seen >= current:  # a peak of before the last change is past
        since_s, seen = at_s, 0
    peak = max(seen, plan.wanted)
    memory = msgspec.structs.replace(memory, low_since_s=since_s, low_peak=peak)
    start = start_s if is_number(start_s) and start_s >= 0 else settings.start_s
    hold_s = max(settings.hold_s, settings.hold_start_ratio * start)
    unready = max(0, current - plan.scale.ready)
    is_due = at_s - since_s >= hold_s
    if not is_due:
        reason = f"{plan.reason}; fewer would do, held for {hold_s:.2g} s"
        return dataclasses.replace(plan, wanted=current, memory=memory, reason=reason)
    if unready == 0 and not is_carried(settings, plan, execution):
        reason = f"{plan.reason}; {current - 1} would be above {settings.carry_ratio:.0%} busy"
        return dataclasses.replace(plan, wanted=current, memory=memory, reason=reason)
    wanted = max(peak, current - unready) if unready else current - 1
    memory = msgspec.structs.replace(memory, low_since_s=at_s, low_peak=0)
    return dataclasses.replace(
        plan, wanted=wanted, memory=memory, reason=f"{plan.reason}; surplus given back"
    )


def is_carried(settings: PolicySettings, plan: Plan, execution: str) -> bool:
    """Whether one replica fewer stays below the utilisation bound by the long-window load."""
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
    return (known.arrival_slow_rps or 0.0) / (rest * known.capacity_rps) < settings.carry_ratio

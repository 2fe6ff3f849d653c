"""Scale to zero and from zero, for all stages of a pipeline at once.

Before it: corrected plans. After it: clamps. A pipeline through which nothing came for a while, and in
which nothing waits or is served, may go to zero where its labels allow it; damping does not slow that. The
first request that waits anywhere brings every stage up in the same tick, not one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from keystage.controller.domain.snapshot import FunctionView
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings


def may_idle(scale: FunctionView) -> bool:
    """Whether a function may go to zero by itself."""
    return scale.min_replicas <= 0 or scale.zero_after_s is not None


def idle_after_s(settings: PolicySettings, scale: FunctionView) -> float:
    """Seconds without work after which it may; what is no number counts as never."""
    if scale.zero_after_s is None:
        return settings.idle_s
    return scale.zero_after_s if scale.zero_after_s >= 0 else math.inf


def idle(settings: PolicySettings, plans: Sequence[Plan], at_s: float) -> list[Plan]:
    """Marks stages that may go to zero, and all stages while something waits for one of them."""
    if not plans:
        return []
    is_waking = any(p.known.queue > 0 or p.scale.wake for p in plans)
    if not any(may_idle(p.scale) for p in plans):
        return [msgspec.structs.replace(p, is_waking=True) for p in plans] if is_waking else list(plans)
    since_s = plans[0].memory.busy_at_s
    is_busy = is_waking or any(p.known.in_flight > 0 or p.known.tick_arrivals > 0 for p in plans)
    if is_busy or since_s is None or since_s > at_s:
        since_s = at_s
    marked = []
    for plan in plans:
        is_idle = not is_busy and may_idle(plan.scale) and not plan.is_held
        is_idle = is_idle and (
            at_s - since_s >= idle_after_s(settings, plan.scale) or plan.scale.current == 0
        )
        wanted = 0 if is_idle else plan.wanted
        reason = f"nothing came for {at_s - since_s:.0f} s" if is_idle else plan.reason
        marked.append(
            msgspec.structs.replace(plan, wanted=wanted, reason=reason, is_idle=is_idle, is_waking=is_waking)
        )
    memory = msgspec.structs.replace(marked[0].memory, busy_at_s=since_s)
    return [msgspec.structs.replace(marked[0], memory=memory), *marked[1:]]

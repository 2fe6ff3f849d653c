"""Plain functions: by the load that gateways report, and to zero when none comes. Routers: as they are.

Before it: the snapshot. After it: clamps. No queueing model knows a plain function's service, so its labels
say what one replica takes; the number is

    r = ceil(load / (target * proportion))      load: requests in flight, or requests a second

(OpenFaaS' autoscaler multiplies the mean load per ready replica by their number, which is the same). It
grows at once and is given back as slowly as a stage's. It never goes to zero while anything is in flight or
waits, nor where nobody reports: then it keeps its number.
"""

from __future__ import annotations

import math

import msgspec

from keystage.controller.domain.snapshot import FunctionView, Target
from keystage.controller.domain.state import PlainState
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.demand import ceil_within
from keystage.controller.policy.idle import idle_after_s, may_idle
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import MOST_REPLICAS, PolicySettings

MOST_STARTS = 1e9
"""Between two looks; more is an error in counting, and must not outgrow a number."""
SPREAD_S = 1.0
"""As often as gateways report: what came in a longer time did not come at once."""
SETTLED = 3.0
"""Time constants after which a rate counted from nothing is known to 5 %."""


def plain(settings: PolicySettings, scale: FunctionView, memory: PlainState, at_s: float) -> Plan:
    """Plans a router or plain function."""
    current = scale.current
    as_it_is = Plan(scale=scale, wanted=current, corrected=current, reason="as it is")
    if scale.loads is None:
        return as_it_is
    in_flight = _sum([load.in_flight for load in scale.loads])
    memory, came, is_counted = _watched(settings, scale, memory, at_s)
    is_busy = in_flight is None or in_flight > 0 or came or scale.wake
    busy_at_s = memory.busy_at_s
    if is_busy or busy_at_s is None or busy_at_s > at_s:
        busy_at_s = at_s
    memory = msgspec.structs.replace(memory, busy_at_s=busy_at_s)
    known = Estimates(arrival_rps=memory.rate_rps, in_flight=in_flight or 0.0)
    plan = msgspec.structs.replace(as_it_is, known=known, plain=memory)
    is_due = current == 0 or at_s - busy_at_s >= idle_after_s(settings, scale)
    if not is_busy and may_idle(scale) and is_due:
        reason = f"nothing came for {at_s - busy_at_s:.0f} s"
        rested = msgspec.structs.replace(memory, low_since_s=None, low_peak=0)
        return msgspec.structs.replace(plan, wanted=0, corrected=0, reason=reason, is_idle=True, plain=rested)
    if scale.target is None or in_flight is None:
        return plan
    if not is_counted and scale.target.kind == "rps":
        return msgspec.structs.replace(plan, reason="hold: a gateway does not tell how many requests began")
    return _by_load(settings, plan, scale.target, memory, at_s)


def _by_load(settings: PolicySettings, plan: Plan, target: Target, memory: PlainState, at_s: float) -> Plan:
    is_rate = target.kind == "rps"
    load = memory.rate_rps if is_rate else plan.known.in_flight
    if not 0 < target.per_replica < math.inf:
        return plan
    need = ceil_within(load / target.per_replica, MOST_REPLICAS)
    what = (
        f"{load:.3g} requests {'a second' if is_rate else 'in flight'}, {target.per_replica:.3g} per replica"
    )
    wanted = max(plan.lowest, min(plan.highest, need))
    if target.step is not None:
        most = max(plan.scale.current, plan.scale.ready + max(0, target.step))
        if wanted > most:
            wanted, what = most, f"{what}; at most {target.step} more than are ready"
    hold_s = max(settings.hold_s, SETTLED * settings.load_s) if is_rate else settings.hold_s
    wanted, what, memory = _damped(settings, plan.scale.current, wanted, what, memory, at_s, hold_s)
    return msgspec.structs.replace(plan, wanted=wanted, corrected=need, reason=what, plain=memory)


def _damped(
    settings: PolicySettings,
    current: int,
    wanted: int,
    reason: str,
    memory: PlainState,
    at_s: float,
    hold_s: float,
) -> tuple[int, str, PlainState]:
    """Gives one replica back after `hold_s` in which fewer would always have done, the next ones sooner."""
    if wanted >= current:
        return wanted, reason, msgspec.structs.replace(memory, low_since_s=None, low_peak=0)
    since_s, peak = memory.low_since_s, memory.low_peak
    if since_s is None or since_s > at_s or peak >= current:  # a peak of before the last change is past
        since_s, peak = at_s, 0
    peak = max(peak, wanted)
    if at_s - since_s < hold_s:
        memory = msgspec.structs.replace(memory, low_since_s=since_s, low_peak=peak)
        return current, f"{reason}; fewer would do, held for {hold_s:.2g} s", memory
    next_s = at_s - (1 - settings.hold_next_ratio) * hold_s
    memory = msgspec.structs.replace(memory, low_since_s=next_s, low_peak=0)
    return max(peak, current - 1), f"{reason}; surplus given back", memory


def _watched(
    settings: PolicySettings, scale: FunctionView, memory: PlainState, at_s: float
) -> tuple[PlainState, bool, bool]:
    """Memory with the rate up to now, whether anything came since the last look, and whether that is known.

    The rate is S / tau with S <- S e^(-dt/tau) + starts: from nothing it needs some `load_s` to be known, and
    a report once a second moves it by dt/tau. What came in a longer time is taken for evenly spread. A
    gateway seen for the first time tells where its count stands; what it had before is no rate. While one's
    count is missing, or less than it was (each start of a gateway has a name of its own), memory stays.
    """
    came = False
    starts = 0.0
    started: dict[str, float] = {}
    for load in scale.loads or ():
        now = load.started
        before = memory.started.get(load.gateway)
        if now is None or not (before or 0.0) <= now < math.inf:
            return memory, True, False  # not known: not to be taken for nothing
        started[load.gateway] = now
        if before is None:
            came = came or now > 0
        elif now > before:
            came = True
            starts += min(now - before, MOST_STARTS)
    tau_s = max(1e-3, settings.load_s)
    since_s = at_s - memory.at_s if memory.at_s is not None and memory.at_s <= at_s else 0.0
    faded = math.exp(-since_s / tau_s)
    came_rps = starts / tau_s if since_s <= SPREAD_S else starts / since_s * (1 - faded)
    rate_rps = memory.rate_rps * faded + came_rps
    return msgspec.structs.replace(memory, at_s=at_s, started=started, rate_rps=rate_rps), came, True


def _sum(values: list[float | None]) -> float | None:
    """The sum; None where one is not known, or none that can be."""
    total = 0.0
    for value in values:
        if value is None or not 0 <= value < math.inf:
            return None
        total += value
    return total

"""Arrival rate, variation and service moments of one stage from cumulative counters.

Before it: the platform reads counters that only grow (`router.api.StageCounters`). After it: the
corrector uses `Estimates`. It takes differences, so it survives restarts (an unknown incarnation
or a shrinking counter gives no difference for once), gaps (a difference over ten seconds is as true
as one over a tick), repeated samples (a router clock that stands still) and time that steps back.
Nothing here raises on measured values: what is not a finite number makes the estimate invalid.

Two exponentially decayed windows: S <- S exp(-dt/tau) + delta. `fast` follows bursts, `slow` gives
moments. rate = arrivals / span, scv = E[x^2]/E[x]^2 - 1.
A CV estimated from too few arrivals is worse than a guess (at CV 8 a window of 200 arrivals reads
4.9 to 9.4): it counts only from 20 CV^2 arrivals on, before that the prior holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import msgspec

from keystage.controller.domain.snapshot import Counters, RouterSample, WorkerSample
from keystage.controller.domain.state import EstimatorState, Moments

_HUGE = 1e15
"""No queue is as long; larger ones are garbled, and their sum must not overflow."""


class EstimatorSettings(msgspec.Struct, frozen=True):
    """Windows and priors.

    Attributes:
        fast_s: time constant of the short window: a few starts of a replica on one machine.
        slow_s: time constant of the long window: at 35 arrivals a second enough for CV 4.
        stale_s: a router clock standing still for longer makes the estimate invalid.
        warm_s: services within this time of a worker's appearance are left out of the moments
            (first batches run cold and would poison the capacity model).
        prior_arrival_scv: squared CV of arrivals until measured: the geometric mean of the CVs of
            the two Azure LLM 2023 traces (conversation 1.09, code 13.2) is 3.8.
        prior_service_scv: squared CV of services until measured (1: exponential).
        scv_samples: arrivals per CV^2 needed before a measured CV counts.
        services: served items from which on their moments count.
    """

    fast_s: float = 1.5
    slow_s: float = 60.0
    stale_s: float = 3.0
    warm_s: float = 1.0
    prior_arrival_scv: float = 14.4
    prior_service_scv: float = 1.0
    scv_samples: float = 20.0
    services: float = 20.0


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one stage now. None: not known.

    Attributes:
        invalid: why nothing below may be used, empty when it may.
        arrival_rps: arrivals a second over the short window.
        arrival_slow_rps: the same over the long window.
        arrival_scv: squared CV of inter-arrival times.
        service_s: mean service time of an item.
        service_scv: squared CV of service times.
        capacity_rps: items one busy worker finishes a second.
        sojourn_s: mean wait + service over the long window.
        queue: items waiting now.
        in_flight: items in service now.
        busy_ratio: compute seconds per worker second over the long window.
        slots: mean slots of a ready worker.
        slot_ratio: slots in use now over slots granted.
        samples: decayed count of services behind the moments.
        tick_services: items served since the last tick.
        tick_sojourn_s: sum of their sojourn times.
    """

    invalid: str = ""
    arrival_rps: float | None = None
    arrival_slow_rps: float | None = None
    arrival_scv: float = 1.0
    service_s: float | None = None
    service_scv: float = 1.0
    capacity_rps: float | None = None
    sojourn_s: float | None = None
    queue: float = 0.0
    in_flight: float = 0.0
    busy_ratio: float | None = None
    slots: float | None = None
    slot_ratio: float | None = None
    samples: float = 0.0
    tick_services: float = 0.0
    tick_sojourn_s: float = 0.0


def estimate(
    settings: EstimatorSettings,
    state: EstimatorState,
    at_s: float,
    routers: Sequence[RouterSample],
    workers: Sequence[WorkerSample],
    profile_s: float | None = None,
) -> tuple[Estimates, EstimatorState]:
    """Takes one sample in and says what is known.

    Args:
        settings: windows and priors.
        state: memory from the last call.
        at_s: time of the sample in seconds, finite.
        routers: one sample per router of the pipeline.
        workers: one sample per ready worker of the stage.
        profile_s: service seconds of an item by a profile, used until services were measured.
    """
    vectors = {r.incarnation: _vector(r.counters) for r in routers}
    clocks = {r.incarnation: r.at_s for r in routers if is_number(r.at_s)}
    if not routers:
        return Estimates(invalid="no router statistics"), state
    if len(clocks) < len(vectors) or any(v is None for v in vectors.values()):
        return Estimates(invalid="a counter is missing or not a number"), state
    totals = {k: v for k, v in vectors.items() if v is not None}
    works = {w.replica: (w.busy_s, w.rows) for w in workers if is_number(w.busy_s) and is_number(w.rows)}
    if state.at_s is None or at_s < state.at_s:
        state = _rebased(state, at_s, totals, clocks, works)
        return _summary(settings, state, routers, workers, profile_s, ()), state
    if all(clocks[k] == state.clocks.get(k) for k in clocks):
        if at_s - state.at_s > settings.stale_s:
            return Estimates(invalid=f"statistics stand still for {at_s - state.at_s:.1f} s"), state
        return _summary(settings, state, routers, workers, profile_s, ()), state
    delta, state = _advance(settings, state, at_s, totals, clocks, works)
    return _summary(settings, state, routers, workers, profile_s, delta), state


def _advance(
    settings: EstimatorSettings,
    state: EstimatorState,
    at_s: float,
    totals: Mapping[str, tuple[float, ...]],
    clocks: Mapping[str, float],
    works: Mapping[str, tuple[float, ...]],
) -> tuple[tuple[float, ...], EstimatorState]:
    """Adds the growth since the last sample to both windows."""
    assert state.at_s is not None
    dt_s = at_s - state.at_s
    delta = _growth(state.routers, totals, 7)
    busy_s, rows = _growth(state.workers, works, 2)
    grew_at_s = at_s if set(works) - set(state.workers) else state.grew_at_s
    is_cold = grew_at_s is not None and at_s - grew_at_s < settings.warm_s
    arrivals, gap_s, gap_s2, services, service_s, service_s2, sojourn_s = delta
    if is_cold and state.slow.services >= settings.services:
        service = Moments()
    else:
        service = Moments(services=services, service_s=service_s, service_s2=service_s2, sojourn_s=sojourn_s)
    gain = msgspec.structs.replace(
        service,
        span_s=dt_s,
        arrivals=arrivals,
        gap_s=gap_s,
        gap_s2=gap_s2,
        busy_s=busy_s,
        rows=rows,
        worker_s=dt_s * len(works),
    )
    return delta, EstimatorState(
        at_s=at_s,
        routers=dict(totals),
        clocks=dict(clocks),
        workers=dict(works),
        grew_at_s=grew_at_s,
        fast=_decayed(state.fast, gain, math.exp(-dt_s / settings.fast_s)),
        slow=_decayed(state.slow, gain, math.exp(-dt_s / settings.slow_s)),
    )


def _rebased(
    state: EstimatorState,
    at_s: float,
    totals: Mapping[str, tuple[float, ...]],
    clocks: Mapping[str, float],
    works: Mapping[str, tuple[float, ...]],
) -> EstimatorState:
    """Begins anew at this sample; at the very first one the totals so far give the service moments."""
    slow = state.slow
    if state.at_s is None:
        _, _, _, services, service_s, service_s2, _ = (sum(v) for v in zip(*totals.values(), strict=True))
        slow = Moments(services=services, service_s=service_s, service_s2=service_s2)
        slow = slow if _all_finite(services, service_s, service_s2) else Moments()
    return EstimatorState(
        at_s=at_s, routers=dict(totals), clocks=dict(clocks), workers=dict(works), fast=state.fast, slow=slow
    )


def _summary(
    settings: EstimatorSettings,
    state: EstimatorState,
    routers: Sequence[RouterSample],
    workers: Sequence[WorkerSample],
    profile_s: float | None,
    delta: tuple[float, ...],
) -> Estimates:
    fast, slow = state.fast, state.slow
    service_s = _ratio(slow.service_s, slow.services)
    if service_s is None or service_s <= 0:
        service_s = profile_s if is_number(profile_s) and profile_s > 0 else None
    busy_rows_rps = _ratio(slow.rows, slow.busy_s) if slow.rows >= settings.services else None
    slots = [w.slots for w in workers if is_number(w.slots) and w.slots > 0]
    held = [w.held_slots for w in workers if is_number(w.held_slots) and w.held_slots >= 0]
    scv = _scv(slow.arrivals, slow.gap_s, slow.gap_s2)
    has_scv = scv is not None and slow.arrivals >= settings.scv_samples * max(1.0, scv)
    service_scv = _scv(slow.services, slow.service_s, slow.service_s2)
    has_service_scv = service_scv is not None and slow.services >= settings.services
    sojourn_s = _ratio(slow.sojourn_s, slow.services)
    return Estimates(
        arrival_rps=_ratio(fast.arrivals, fast.span_s),
        arrival_slow_rps=_ratio(slow.arrivals, slow.span_s),
        arrival_scv=scv if has_scv and scv is not None else settings.prior_arrival_scv,
        service_s=service_s,
        service_scv=service_scv
        if has_service_scv and service_scv is not None
        else settings.prior_service_scv,
        capacity_rps=busy_rows_rps or (1 / service_s if service_s and 1 / service_s < math.inf else None),
        sojourn_s=sojourn_s or None,
        queue=_total([r.counters.queue for r in routers]),
        in_flight=_total([r.counters.in_flight for r in routers]),
        busy_ratio=_ratio(slow.busy_s, slow.worker_s),
        slots=sum(slots) / len(slots) if slots else None,
        slot_ratio=_ratio(sum(held), sum(slots)),
        samples=slow.services,
        tick_services=delta[3] if delta else 0.0,
        tick_sojourn_s=delta[6] if delta else 0.0,
    )


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether the value is there and finite."""
    return value is not None and math.isfinite(value)


def _vector(c: Counters) -> tuple[float, ...] | None:
    values = (
        c.arrivals,
        c.gap_sum_s,
        c.gap_sq_sum_s2,
        c.services,
        c.service_sum_s,
        c.service_sq_sum_s2,
        c.sojourn_sum_s,
    )
    numbers = tuple(v for v in values if is_number(v))
    return numbers if len(numbers) == len(values) else None


def _growth(
    before: Mapping[str, tuple[float, ...]], now: Mapping[str, tuple[float, ...]], width: int
) -> tuple[float, ...]:
    """Sum of differences over the sources known before; a source that shrank began anew and gives none."""
    total = [0.0] * width
    for source, values in now.items():
        steps = [b - a for a, b in zip(before.get(source, values), values, strict=False)]
        if len(steps) == width and all(s >= 0 for s in steps) and _all_finite(*steps):
            total = [t + s for t, s in zip(total, steps, strict=True)]
    return tuple(total)


def _decayed(old: Moments, gain: Moments, factor: float) -> Moments:
    fields = [getattr(old, f) * factor + getattr(gain, f) for f in Moments.__struct_fields__]
    return Moments(*fields) if _all_finite(*fields) else Moments()


def _scv(count: float, total: float, squares: float) -> float | None:
    mean = _ratio(total, count)
    mean_square = _ratio(squares, count)
    if not mean or mean_square is None or count < 2:
        return None
    scv = mean_square / mean / mean - 1
    return max(0.0, scv) if math.isfinite(scv) else None


def _ratio(top: float, bottom: float) -> float | None:
    if not bottom > 0 or not math.isfinite(bottom):
        return None
    value = top / bottom
    return value if math.isfinite(value) and value >= 0 else None


def _total(values: Sequence[float | None]) -> float:
    total = math.fsum(v for v in values if is_number(v) and 0 < v < _HUGE)
    return total if math.isfinite(total) else 0.0


def _all_finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)

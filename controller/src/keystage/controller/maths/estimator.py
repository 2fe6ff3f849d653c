"""Arrival rate, variation and service moments of one stage from cumulative counters.

Before it: the platform reads counters that only grow (`router.api.StageCounters`). After it: the
corrector uses `Estimates`. It takes differences, so it survives restarts (an unknown incarnation
or a shrinking counter gives no difference for once), gaps (a difference over ten seconds is as true
as one over a tick), repeated samples (a router clock that stands still) and time that steps back.
Nothing here raises on measured values: what is not a finite number makes the estimate invalid.

Two exponentially decayed windows: S <- S exp(-dt/tau) + delta. `fast` follows bursts, `slow` gives
moments. rate = arrivals / span, scv = E[x^2]/E[x]^2 - 1. When the rate shifts (`maths.shift`) the slow
rate begins anew. The gaps behind the CV stay: a step adds little to it (few of the gaps are long), while
bursts that come again and again become the variation they are, and shift the rate no more.
A CV estimated from too few arrivals is worse than a guess (at CV 8 a window of 200 arrivals reads
4.9 to 9.4): it counts only from 20 CV^2 arrivals on, before that the prior holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import msgspec

from keystage.controller.domain.snapshot import Counters, RouterSample, WorkerSample
from keystage.controller.domain.state import EstimatorState, Moments
from keystage.controller.maths.consistency import FLOWS, Vectors, contradiction, fallen, moves, peaks
from keystage.controller.maths.shift import is_shift

_HUGE = 1e15
"""No queue is as long; larger ones are garbled, and their sum must not overflow."""

LEAST_S, MOST_S = 1e-9, 1e6
"""Times believed, in seconds: longer ones (eleven days) and shorter ones are garbled."""

MOST_RPS = 1e9
"""Rates believed, per second, and the inverse of the least service rate."""

MOST_SLOTS = 4096
"""Slots of a worker believed."""

MOST_SCV = 1e4
"""CV 100: a larger one is garbled, and its powers must not overflow."""


class EstimatorSettings(msgspec.Struct, frozen=True):
    """Windows and priors.

    Attributes:
        fast_s: time constant of the short window: a few starts of a replica on one machine.
        slow_s: time constant of the long window: at 35 arrivals a second enough for CV 4.
        stale_s: a router clock standing still for longer makes the estimate invalid, as counters that fell
            do for as long.
        warm_s: services within this time of a worker's appearance are left out of the moments
            (first batches run cold and would poison the capacity model).
        prior_arrival_scv: squared CV of arrivals until measured: the geometric mean of the CVs of
            the two Azure LLM 2023 traces (conversation 1.09, code 13.2) is 3.8.
        prior_service_scv: squared CV of services until measured (1: exponential).
        scv_samples: arrivals per CV^2 needed before a measured CV counts.
        services: served items from which on their moments count.
        rest_s: counters that stand still are taken in after this long at the latest (before they count as
            stale): nothing is lost, since only differences count, and most stages of a large cluster rest.
        shift_z: deviations from which a count means another rate. By chance a Poisson flow of 60/s passes 4
            once in some hours, which is a burst of replicas for nothing, and 4.5 once in days; a
            fourfold step of 20 a second still passes it within the tick.
    """

    fast_s: float = 1.5
    slow_s: float = 60.0
    stale_s: float = 3.0
    warm_s: float = 1.0
    prior_arrival_scv: float = 14.4
    prior_service_scv: float = 1.0
    scv_samples: float = 20.0
    services: float = 20.0
    shift_z: float = 4.5
    rest_s: float = 2.0


class Estimates(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of one stage now. None: not known.

    Attributes:
        invalid: why nothing below may be used, empty when it may.
        arrival_rps: arrivals a second over the short window.
        arrival_slow_rps: the same over the long window, or since the rate shifted.
        arrival_scv: squared CV of inter-arrival times.
        service_s: mean service time of an item.
        service_scv: squared CV of service times.
        capacity_rps: items one busy worker finishes a second.
        rows_rps: the same where busy time and rows tell it; then batches of their size are in it.
        sojourn_s: mean wait + service over the long window.
        queue: items waiting now.
        in_flight: items in service now.
        busy_ratio: compute seconds per worker second over the long window.
        slots: mean slots of a ready worker.
        slot_ratio: slots in use now over slots granted.
        samples: decayed count of services behind the moments.
        tick_arrivals: items that came since the last tick.
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
    rows_rps: float | None = None
    sojourn_s: float | None = None
    queue: float = 0.0
    in_flight: float = 0.0
    busy_ratio: float | None = None
    slots: float | None = None
    slot_ratio: float | None = None
    samples: float = 0.0
    tick_arrivals: float = 0.0
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
    if not routers:
        return Estimates(invalid="no router statistics"), state
    totals: dict[str, tuple[float, ...]] = {}
    clocks: dict[str, float] = {}
    for router in routers:
        totals[router.incarnation] = values = vector(router.counters)
        clock = router.at_s
        if not values or clock is None or not math.isfinite(clock):
            return Estimates(invalid="a counter is missing or not a number"), state
        clocks[router.incarnation] = clock
    delta: Sequence[float] = ()
    if state.at_s is not None and 0 <= at_s - state.at_s < settings.rest_s and totals == state.routers:
        return _summary(settings, state, totals, workers, profile_s, delta), state
    moved = moves(state, clocks, at_s)
    if invalid := contradiction(settings.stale_s, state, totals, moved, at_s):
        return Estimates(invalid=invalid), state
    works: dict[str, tuple[float, ...]] = {
        w.replica: (w.busy_s, w.rows)
        for w in workers
        if w.busy_s is not None and w.rows is not None and math.isfinite(w.busy_s + w.rows)
    }
    before_fall, is_back = peaks(state, totals) if state.at_s is not None else ({}, False)
    state = msgspec.structs.replace(state, peaks=before_fall) if before_fall or is_back else state
    if state.at_s is None or at_s < state.at_s or is_back or fallen(state, totals):
        state = _rebased(state, at_s, totals, clocks, works, moved)
    elif all(clocks[k] == state.clocks.get(k) for k in clocks):
        if at_s - state.at_s > settings.stale_s:
            return Estimates(invalid=f"statistics stand still for {at_s - state.at_s:.1f} s"), state
    else:
        delta, state = _advance(settings, state, at_s, totals, clocks, works, moved)
    return _summary(settings, state, totals, workers, profile_s, delta), state


def _advance(
    settings: EstimatorSettings,
    state: EstimatorState,
    at_s: float,
    totals: dict[str, tuple[float, ...]],
    clocks: dict[str, float],
    works: dict[str, tuple[float, ...]],
    moved: dict[str, float],
) -> tuple[list[float], EstimatorState]:
    """Adds the growth since the last sample to both windows."""
    assert state.at_s is not None
    dt_s = at_s - state.at_s
    delta = _growth(state.routers, totals, FLOWS)
    busy_s, rows = _growth(state.workers, works, 2)
    grew_at_s = at_s if works.keys() - state.workers.keys() else state.grew_at_s
    is_cold = grew_at_s is not None and at_s - grew_at_s < settings.warm_s
    arrivals, gap_s, gap_s2, services, service_s, service_s2, sojourn_s = delta
    if is_cold and state.slow.services >= settings.services:
        services = service_s = service_s2 = sojourn_s = 0.0
    gain = Moments(
        dt_s, arrivals, gap_s, gap_s2, services, service_s, service_s2, sojourn_s,
        busy_s, rows, dt_s * len(works), arrivals,
    )  # fmt: skip
    fast = _decayed(state.fast, gain, math.exp(-dt_s / settings.fast_s))
    slow = _decayed(state.slow, gain, math.exp(-dt_s / settings.slow_s))
    anew = _shifted(settings, state.slow, gain, fast)
    if anew is not None:
        fast = msgspec.structs.replace(fast, span_s=anew.span_s, arrivals=anew.arrivals)
        slow = msgspec.structs.replace(slow, span_s=anew.span_s, arrivals=anew.arrivals)
    return delta, EstimatorState(
        at_s=at_s, routers=totals, clocks=clocks, workers=works, grew_at_s=grew_at_s, fast=fast, slow=slow,
        moved=moved, peaks=state.peaks,
    )  # fmt: skip


def _shifted(settings: EstimatorSettings, before: Moments, gain: Moments, fast: Moments) -> Moments | None:
    """Time and arrivals from which a new rate starts, None while the rate is what it was.

    They are this tick's where it alone tells, or the rate fell; the window still holds arrivals of before.
    """
    if not (before.arrivals > 0 and before.span_s > 0):
        return None
    rate_rps = before.arrivals / before.span_s
    scv = _arrival_scv(settings, before)
    scv = max(scv, _scv(before.gaps, before.gap_s, before.gap_s2) or 0.0)  # a doubt counts against a shift
    for seen in (gain, fast):
        expected = rate_rps * seen.span_s
        if is_shift(seen.arrivals, expected, scv, before.arrivals, settings.shift_z):
            return seen if seen.arrivals > expected else gain
    return None


def _rebased(
    state: EstimatorState,
    at_s: float,
    totals: dict[str, tuple[float, ...]],
    clocks: dict[str, float],
    works: dict[str, tuple[float, ...]],
    moved: dict[str, float],
) -> EstimatorState:
    """Begins anew at this sample; at the very first one the totals so far give the service moments."""
    slow = state.slow
    if state.at_s is None:
        services, service_s, service_s2 = (sum(v[i] for v in totals.values()) for i in (3, 4, 5))
        is_sane = math.isfinite(services) and math.isfinite(service_s) and math.isfinite(service_s2)
        slow = (
            Moments(services=services, service_s=service_s, service_s2=service_s2) if is_sane else Moments()
        )
    return EstimatorState(
        at_s=at_s, routers=totals, clocks=clocks, workers=works, fast=state.fast, slow=slow, moved=moved,
        peaks=state.peaks,
    )  # fmt: skip


def _summary(
    settings: EstimatorSettings,
    state: EstimatorState,
    totals: Vectors,
    workers: Sequence[WorkerSample],
    profile_s: float | None,
    delta: Sequence[float],
) -> Estimates:
    fast, slow = state.fast, state.slow
    service_s = _ratio(slow.service_s, slow.services)
    if service_s is None or service_s <= 0:
        service_s = profile_s if is_number(profile_s) and LEAST_S <= profile_s <= MOST_S else None
    rows_rps = _ratio(slow.rows, slow.busy_s) if slow.rows >= settings.services else None
    capacity_rps = rows_rps or (1 / service_s if service_s and LEAST_S <= service_s <= MOST_S else None)
    granted = held = count = 0.0
    for worker in workers:
        slots, used = worker.slots, worker.held_slots
        if slots is not None and 0 < slots <= MOST_SLOTS:
            granted += slots
            count += 1
        if used is not None and 0 <= used <= MOST_SLOTS:
            held += used
    service_scv = None
    if slow.services >= settings.services:
        service_scv = _scv(slow.services, slow.service_s, slow.service_s2)
    queue = in_flight = 0.0
    for values in totals.values():
        queue += values[FLOWS]
        in_flight += values[FLOWS + 1]
    return Estimates(
        arrival_rps=fast.arrivals / fast.span_s if fast.span_s > 1e-9 else None,
        arrival_slow_rps=slow.arrivals / slow.span_s if slow.span_s > 1e-9 else None,
        arrival_scv=_arrival_scv(settings, slow),
        service_s=service_s,
        service_scv=service_scv if service_scv is not None else settings.prior_service_scv,
        capacity_rps=capacity_rps,
        rows_rps=rows_rps,
        sojourn_s=_ratio(slow.sojourn_s, slow.services) or None,
        queue=queue,
        in_flight=in_flight,
        busy_ratio=_ratio(slow.busy_s, slow.worker_s),
        slots=granted / count if count else None,
        slot_ratio=_ratio(held, granted),
        samples=slow.services,
        tick_arrivals=delta[0] if delta else 0.0,
        tick_services=delta[3] if delta else 0.0,
        tick_sojourn_s=delta[6] if delta else 0.0,
    )


def _arrival_scv(settings: EstimatorSettings, slow: Moments) -> float:
    """Squared CV of arrivals: measured, or the prior until there were arrivals enough."""
    scv = _scv(slow.gaps, slow.gap_s, slow.gap_s2)
    if scv is not None and slow.gaps >= settings.scv_samples * max(1.0, scv):
        return scv
    return settings.prior_arrival_scv


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether the value is there and finite."""
    return value is not None and math.isfinite(value)


def vector(c: Counters) -> tuple[float, ...]:
    """A router's counters of a stage as numbers: seven that grow, queue, in flight; empty if one is missing.

    Queue and in-flight numbers that make no sense count as 0.
    """
    a, g, g2, n, s, s2, t = (
        c.arrivals, c.gap_sum_s, c.gap_sq_sum_s2,
        c.services, c.service_sum_s, c.service_sq_sum_s2, c.sojourn_sum_s,
    )  # fmt: skip
    if a is None or g is None or g2 is None or n is None or s is None or s2 is None or t is None:
        return ()
    if not math.isfinite(a + g + g2 + n + s + s2 + t):
        return ()
    queue, in_flight = c.queue, c.in_flight
    return (
        a, g, g2, n, s, s2, t,
        queue if queue is not None and 0 < queue < _HUGE else 0.0,
        in_flight if in_flight is not None and 0 < in_flight < _HUGE else 0.0,
    )  # fmt: skip


def _growth(before: Vectors, now: Vectors, width: int) -> list[float]:
    """Sum of differences over the sources known before; a source that shrank began anew and gives none."""
    total = [0.0] * width
    for source, values in now.items():
        old = before.get(source)
        if old is None or old == values or len(old) < width:
            continue
        steps = [values[i] - old[i] for i in range(width)]
        if min(steps) >= 0 and math.isfinite(sum(steps)):
            for i in range(width):
                total[i] += steps[i]
    return total


def _decayed(old: Moments, gain: Moments, factor: float) -> Moments:
    fresh = Moments(
        old.span_s * factor + gain.span_s,
        old.arrivals * factor + gain.arrivals,
        old.gap_s * factor + gain.gap_s,
        old.gap_s2 * factor + gain.gap_s2,
        old.services * factor + gain.services,
        old.service_s * factor + gain.service_s,
        old.service_s2 * factor + gain.service_s2,
        old.sojourn_s * factor + gain.sojourn_s,
        old.busy_s * factor + gain.busy_s,
        old.rows * factor + gain.rows,
        old.worker_s * factor + gain.worker_s,
        old.gaps * factor + gain.gaps,
    )
    total = fresh.span_s + fresh.arrivals + fresh.gap_s + fresh.gap_s2 + fresh.services + fresh.service_s
    total += fresh.service_s2 + fresh.sojourn_s + fresh.busy_s + fresh.rows + fresh.worker_s
    return fresh if math.isfinite(total) else Moments()


def _scv(count: float, total: float, squares: float) -> float | None:
    if not 2 <= count < math.inf or total <= 0:
        return None
    mean = total / count
    mean_square = squares / count
    if not mean or mean_square < 0:
        return None
    scv = mean_square / mean / mean - 1
    return min(MOST_SCV, max(0.0, scv)) if math.isfinite(scv) else None


def _ratio(top: float, bottom: float) -> float | None:
    if not 0 < bottom < math.inf:
        return None
    value = top / bottom
    return value if 0 <= value < math.inf else None

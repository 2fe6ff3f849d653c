"""What the policy remembers from tick to tick.

It goes into `decide` and comes out of it; nobody else changes it. It is plain data, so the log can
carry it (as arrays, for size) and the replay can start from any line.
"""

from __future__ import annotations

import msgspec

from keystage.batching.advice import AdviceState


class Moments(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Exponentially decayed sums over one window; ratios of them are weighted means.

    Attributes:
        span_s: decayed observed time (since the last shift of the rate).
        arrivals: decayed count of arrivals in that time.
        gap_s: sum of gaps.
        gap_s2: sum of squared gaps.
        services: count of served items.
        service_s: sum of service times.
        service_s2: sum of squared service times.
        sojourn_s: sum of sojourn times.
        busy_s: compute seconds of all workers.
        rows: rows computed.
        worker_s: seconds of ready workers (workers times time).
        gaps: count of inter-arrival gaps behind gap_s and gap_s2; outlives shifts.
    """

    span_s: float = 0.0
    arrivals: float = 0.0
    gap_s: float = 0.0
    gap_s2: float = 0.0
    services: float = 0.0
    service_s: float = 0.0
    service_s2: float = 0.0
    sojourn_s: float = 0.0
    busy_s: float = 0.0
    rows: float = 0.0
    worker_s: float = 0.0
    gaps: float = 0.0


class EstimatorState(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one stage's estimator.

    Attributes:
        at_s: when the counters below were fresh (snapshot time), None before the first sample.
        routers: counters by router incarnation: seven cumulative ones, queue, in flight.
        clocks: router clock by incarnation.
        workers: cumulative (busy_s, rows) by worker.
        grew_at_s: when a worker appeared last; its first services are left out.
        fast: sums over the short window.
        slow: sums over the long window.
        moved: snapshot time at which each router's clock was seen to have moved last.
        peaks: counters that a router had before they fell, by incarnation.
    """

    at_s: float | None = None
    routers: dict[str, tuple[float, ...]] = {}
    clocks: dict[str, float] = {}
    workers: dict[str, tuple[float, ...]] = {}
    grew_at_s: float | None = None
    fast: Moments = Moments()
    slow: Moments = Moments()
    moved: dict[str, float] = {}
    peaks: dict[str, tuple[float, ...]] = {}


class PidState(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a PID: the integral (in units of the output) and the last error, None before one."""

    integral: float = 0.0
    error: float | None = None


class AdviceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one stage's autoscaling advice.

    Attributes:
        at_s: when the counters below were read.
        totals: (due, bad) by router incarnation.
        works: (served_s, idle_s) by worker.
        idle: lately idle part of each worker's time, decayed.
        windows: what was counted since the number of replicas changed.
        level: replicas a bad rate asked for, None once idle ones were seen.
        level_at_s: when it was set.
        ceiling: replicas an idle fraction allows, None once their number changed.
        reason: the rate or fraction behind either.
    """

    at_s: float | None = None
    totals: dict[str, tuple[float, float]] = {}
    works: dict[str, tuple[float, float]] = {}
    idle: dict[str, float] = {}
    windows: AdviceState = AdviceState()
    level: int | None = None
    level_at_s: float = 0.0
    ceiling: int | None = None
    reason: str = ""


class StageState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of one stage.

    Attributes:
        estimator: see `EstimatorState`.
        trim: the PID's memory.
        found: log of (replicas found by a new leader / feed-forward), fading; None until known.
        measured_s: decayed sum of measured sojourn while the plant was at rest.
        modelled_s: decayed sum of the model's sojourn for the same items.
        acted_at_s: when the desired number changed last.
        desired: the number it changed to.
        low_since_s: since when fewer replicas would do, None while they would not.
        low_peak: the largest need seen since then.
        cores: CPU cores of a replica when the stage was first seen; never fewer are given.
        per_core: 1 / cores, averaged as the measured service times are.
        cores_at_s: when that average was updated last.
        busy_at_s: when the pipeline had something to do last (kept by its entry stage).
        advice: memory of the autoscaling advice, None where batches are not deferred.
    """

    estimator: EstimatorState = EstimatorState()
    trim: PidState = PidState()
    found: float | None = None
    measured_s: float = 0.0
    modelled_s: float = 0.0
    acted_at_s: float | None = None
    desired: int | None = None
    low_since_s: float | None = None
    low_peak: int = 0
    cores: float | None = None
    per_core: float | None = None
    cores_at_s: float | None = None
    busy_at_s: float | None = None
    advice: AdviceMemory | None = None


class PlainState(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one plain function.

    Attributes:
        at_s: when it was looked at last.
        started: requests since its start by gateway, as told last.
        rate_rps: requests a second, decayed.
        busy_at_s: when it had anything to do last.
        low_since_s: since when fewer replicas would do, None while they would not.
        low_peak: the largest need seen since then.
    """

    at_s: float | None = None
    started: dict[str, float] = {}
    rate_rps: float = 0.0
    busy_at_s: float | None = None
    low_since_s: float | None = None
    low_peak: int = 0


class PolicyState(msgspec.Struct, frozen=True):
    """Memory of the policy.

    Attributes:
        stages: by function name.
        published: key-stage order published last, by pipeline.
        is_contended: whether placement was in its regime of contention.
        settled: when a pipeline was looked at last, if nothing was left to do for it then.
        functions: by name, of plain functions whose load is told.
    """

    stages: dict[str, StageState] = {}
    published: dict[str, tuple[int, ...]] = {}
    settled: dict[str, float] = {}
    is_contended: bool = False
    functions: dict[str, PlainState] = {}

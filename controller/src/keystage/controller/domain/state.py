"""What the policy remembers from tick to tick.

It goes into `decide` and comes out of it; nobody else changes it. It is plain data, so the log can
carry it (as arrays, for size) and the replay can start from any line.
"""

from __future__ import annotations

import msgspec


class Moments(msgspec.Struct, frozen=True, array_like=True):
    """Exponentially decayed sums over one window; ratios of them are weighted means.

    Attributes:
        span_s: decayed observed time.
        arrivals: decayed count of arrivals (each with one inter-arrival gap).
        gap_s: sum of gaps.
        gap_s2: sum of squared gaps.
        services: count of served items.
        service_s: sum of service times.
        service_s2: sum of squared service times.
        sojourn_s: sum of sojourn times.
        busy_s: compute seconds of all workers.
        rows: rows computed.
        worker_s: seconds of ready workers (workers times time).
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


class EstimatorState(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one stage's estimator.

    Attributes:
        at_s: when the counters below were fresh (snapshot time), None before the first sample.
        routers: cumulative counters by router incarnation.
        clocks: router clock by incarnation.
        workers: cumulative (busy_s, rows) by worker.
        grew_at_s: when a worker appeared last; its first services are left out.
        fast: sums over the short window.
        slow: sums over the long window.
    """

    at_s: float | None = None
    routers: dict[str, tuple[float, ...]] = {}
    clocks: dict[str, float] = {}
    workers: dict[str, tuple[float, ...]] = {}
    grew_at_s: float | None = None
    fast: Moments = Moments()
    slow: Moments = Moments()


class PidState(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a PID: the integral (in units of the output) and the last error, None before one."""

    integral: float = 0.0
    error: float | None = None


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


class PolicyState(msgspec.Struct, frozen=True):
    """Memory of the policy.

    Attributes:
        stages: by function name.
        published: key-stage order published last, by pipeline.
    """

    stages: dict[str, StageState] = {}
    published: dict[str, tuple[int, ...]] = {}

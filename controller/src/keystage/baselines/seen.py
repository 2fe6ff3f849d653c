"""What a rival reads from a snapshot: counters that only grow, and service times.

Before it: the simulator (or a platform) fills a `Snapshot`. After it: each rival's own arithmetic. All
rivals read the same numbers as Keystage's policy, by this one module: routers that restarted, counters
that are missing and profiles that do not exist are dealt with here and nowhere else. It holds no policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from keystage.controller.domain.snapshot import (
    BatchProfile,
    FunctionView,
    Measured,
    PipelineView,
    Snapshot,
    StageView,
    StartTimes,
)

_Counts = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One stage at one moment.

    Attributes:
        function: function name.
        scale: its replica numbers and bounds.
        arrivals: items that came since it was first seen; never shrinks.
        services: items served since then.
        sojourn_s: sum of their sojourns in seconds.
        queue: items waiting now.
        batch: service seconds of a batch (a profile, or measured as l(1) with batches of one).
        gpus: GPUs of a replica, 0 for none.
        gpu_bytes: memory a replica takes on each of them, 0 where nobody tells.
        start_s: seconds from wanted to ready, None when nobody knows.
    """

    function: str
    scale: FunctionView
    arrivals: float
    services: float
    sojourn_s: float
    queue: float
    batch: BatchProfile
    gpus: int
    gpu_bytes: int
    start_s: float | None

    @property
    def item_s(self) -> float:
        """Seconds of a batch of one."""
        return service_s(self.batch, 1)


@dataclasses.dataclass(slots=True)
class _Memory:
    last: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    total: _Counts = (0.0, 0.0, 0.0, 0.0)


class Watch:
    """Reads pipelines and remembers counters between calls."""

    def __init__(self) -> None:
        self._stages: dict[str, _Memory] = {}

    def see(self, view: PipelineView) -> tuple[Seen, ...] | None:
        """All stages of a pipeline, or None when one of them cannot be read: then nothing may change."""
        if view.missing or not view.stages:
            return None
        seen = [self._see(stage) for stage in view.stages]
        known = tuple(s for s in seen if s is not None)
        return known if len(known) == len(seen) else None

    def pipelines(self, snapshot: Snapshot) -> Iterator[tuple[PipelineView, tuple[Seen, ...]]]:
        """Every pipeline that can be read, with its stages; the others shall be left alone."""
        for view in snapshot.pipelines:
            seen = self.see(view)
            if seen is not None:
                yield view, seen

    def _see(self, stage: StageView) -> Seen | None:
        function = stage.scale.function
        memory = self._stages.setdefault(function, _Memory())
        queue = 0.0
        now: dict[str, tuple[float, ...]] = {}
        for router in stage.routers:
            c = router.counters
            values = tuple(
                v for v in (c.arrivals, c.services, c.sojourn_sum_s, c.service_sum_s) if _is_number(v)
            )
            if len(values) < 4:
                return None
            now[router.incarnation] = values
            queue += c.queue if _is_number(c.queue) and c.queue > 0 else 0.0
        if not now:
            return None
        memory.total = _grown(memory.total, memory.last, now)
        memory.last = now
        arrivals, services, sojourn_s, spent_s = memory.total
        batch = _batch(stage, spent_s / services if services > 0 else None)
        if batch is None:
            return None
        return Seen(
            function=function,
            scale=stage.scale,
            arrivals=arrivals,
            services=services,
            sojourn_s=sojourn_s,
            queue=queue,
            batch=batch,
            gpus=stage.gpus,
            gpu_bytes=stage.gpu_bytes,
            start_s=_start_s(stage),
        )


def service_s(batch: BatchProfile, items: int) -> float:
    """l(b) in seconds."""
    return batch.alpha_s * items + batch.beta_s


def rate_rps(batch: BatchProfile, items: int) -> float:
    """Items a second of a replica that is always busy with batches of this size."""
    return items / service_s(batch, items)


def batch_within(batch: BatchProfile, limit_s: float) -> int:
    """The largest batch served within a time, at least 1."""
    for items in range(batch.most, 1, -1):
        if service_s(batch, items) <= limit_s:
            return items
    return 1


def deadline_s(view: PipelineView, seen: tuple[Seen, ...], service_ratio: float) -> float:
    """The pipeline's objective in seconds: deadline, else TTFT, else a multiple of its service time."""
    for stated in (view.slo.deadline_s, view.slo.ttft_s):
        if _is_number(stated) and stated > 0:
            return stated
    return service_ratio * math.fsum(s.item_s for s in seen)


def shares_s(view: PipelineView, seen: tuple[Seen, ...], service_ratio: float) -> list[float]:
    """Each stage's part of the pipeline's objective in seconds, in proportion to its service time."""
    slo_s = deadline_s(view, seen, service_ratio)
    total_s = math.fsum(s.item_s for s in seen)
    return [slo_s * s.item_s / total_s for s in seen]


def _batch(stage: StageView, measured_s: float | None) -> BatchProfile | None:
    profile = stage.batch
    if profile is not None and _is_number(profile.alpha_s) and _is_number(profile.beta_s):
        most = max(1, profile.most)
        if profile.alpha_s >= 0 and profile.alpha_s + profile.beta_s > 0:
            return BatchProfile(alpha_s=profile.alpha_s, beta_s=max(0.0, profile.beta_s), most=most)
    for seconds in (stage.profile_s, measured_s):
        if _is_number(seconds) and seconds > 0:
            return BatchProfile(alpha_s=seconds, beta_s=0.0, most=1)
    return None


def _start_s(stage: StageView) -> float | None:
    """Measured start time, else the fastest source that is not another replica's GPU."""
    starts = stage.starts or StartTimes()
    for seconds in (stage.start_s, starts.memory_s, starts.disk_s, starts.remote_s):
        if _is_number(seconds) and seconds >= 0:
            return seconds
    return None


def _grown(
    total: _Counts, before: Mapping[str, tuple[float, ...]], now: Mapping[str, tuple[float, ...]]
) -> _Counts:
    """Adds the growth since the last look; a router seen first, or one that began anew, adds nothing."""
    sums = list(total)
    for router, values in now.items():
        steps = [b - a for a, b in zip(before.get(router, values), values, strict=True)]
        if all(step >= 0 for step in steps):
            sums = [s + step for s, step in zip(sums, steps, strict=True)]
    arrivals, services, sojourn, spent = sums
    return arrivals, services, sojourn, spent


def _is_number(value: Measured) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)

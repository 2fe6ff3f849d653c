"""Turns the router's cumulative counters into per-stage series: queue, replicas, rate, CV.

Fed by `monitor` with one reading after another, read by `report` and `plots`. Pure: it gets the
time with each reading and does no IO.

Rate and CV are taken over a sliding window: with n arrivals in it, m1 = sum(gaps)/n and
m2 = sum(gaps^2)/n, cv = sqrt(m2/m1^2 - 1). A window of a bursty stream reads low and noisy, so it
is shown as what was seen, not as an estimate.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from keystage.router.api import ReplicaStats, RouterStats, StageCounters

WINDOW_S = 15.0
"""Long enough for about ten arrivals at one a second, short enough to show a burst."""

MIN_ARRIVALS = 5
"""Fewer arrivals in the window give no CV."""


BUSY_SPAN_S = 2.0
"""Workers report their compute time once a second: over less, every other reading shows none."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageSample:
    """One stage at one moment.

    Attributes:
        at_s: seconds since the start of the run.
        stage: stage index.
        queue: items waiting.
        in_flight: items being served.
        ready: replicas ready.
        starting: replicas started and not yet ready.
        desired: replicas the gateway reports as wanted, None where it was not readable.
        busy_ratio: compute time per ready replica and second over `BUSY_SPAN_S`, None at first.
        rate_rps: arrivals per second over the window, None before two readings.
        cv: CV of the gaps between them, None below `MIN_ARRIVALS`.
    """

    at_s: float
    stage: int
    queue: int
    in_flight: int
    ready: int
    starting: int
    desired: int | None
    busy_ratio: float | None
    rate_rps: float | None
    cv: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage over a run: means over samples, maxima, and CV over the whole run's arrivals."""

    stage: int
    queue_mean: float
    queue_max: int
    in_flight_mean: float
    ready_mean: float
    ready_max: int
    busy_mean_ratio: float | None
    arrivals: int
    cv: float | None


class StageSeries:
    """Samples of all stages of one pipeline, in order of time."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: collections.deque[RouterStats] = collections.deque()
        self._first: RouterStats | None = None
        self.samples: list[StageSample] = []

    def add(self, at_s: float, stats: RouterStats, desired: Mapping[int, int] | None = None) -> None:
        """Takes a reading made `at_s` seconds into the run.

        A new incarnation of the router starts the windows anew, as its counters did.
        """
        readings = self._readings
        if readings and readings[-1].incarnation != stats.incarnation:
            readings.clear()
            self._first = None
        previous = self._before(stats.at_s - BUSY_SPAN_S)
        readings.append(stats)
        while len(readings) > 2 and readings[1].at_s <= stats.at_s - self._window_s:
            readings.popleft()
        self._first = self._first or stats
        begin = {counters.stage: counters for counters in readings[0].stages}
        for counters in stats.stages:
            rate_rps, cv = _rate_and_cv(begin.get(counters.stage), counters, stats.at_s - readings[0].at_s)
            hosts = [replica for replica in stats.replicas if counters.stage in replica.stages]
            self.samples.append(
                StageSample(
                    at_s=at_s,
                    stage=counters.stage,
                    queue=counters.queue,
                    in_flight=_in_flight(stats, counters, hosts),
                    ready=sum(replica.state == "ready" for replica in hosts),
                    starting=sum(replica.state == "starting" for replica in hosts),
                    desired=None if desired is None else desired.get(counters.stage),
                    busy_ratio=_busy_ratio(previous, stats, counters.stage),
                    rate_rps=rate_rps,
                    cv=cv,
                )
            )

    def _before(self, at_s: float) -> RouterStats | None:
        """Newest reading up to then, the oldest if all are later, None if there is none."""
        older = [reading for reading in self._readings if reading.at_s <= at_s]
        return older[-1] if older else self._readings[0] if self._readings else None

    def summaries(self) -> list[StageSummary]:
        """One line per stage."""
        stages = sorted({sample.stage for sample in self.samples})
        return [self._summary(stage) for stage in stages]

    def _summary(self, stage: int) -> StageSummary:
        samples = [sample for sample in self.samples if sample.stage == stage]
        arrivals, cv = 0, None
        if self._first is not None and self._readings:
            begin, end = _of(self._first, stage), _of(self._readings[-1], stage)
            if begin is not None and end is not None:
                arrivals = end.arrivals - begin.arrivals
                cv = _rate_and_cv(begin, end, self._readings[-1].at_s - self._first.at_s)[1]
        busy = [sample.busy_ratio for sample in samples if sample.busy_ratio is not None]
        return StageSummary(
            stage=stage,
            queue_mean=_mean([sample.queue for sample in samples]),
            queue_max=max(sample.queue for sample in samples),
            in_flight_mean=_mean([sample.in_flight for sample in samples]),
            ready_mean=_mean([sample.ready for sample in samples]),
            ready_max=max(sample.ready for sample in samples),
            busy_mean_ratio=_mean(busy) if busy else None,
            arrivals=arrivals,
            cv=cv,
        )


def _of(stats: RouterStats, stage: int) -> StageCounters | None:
    return next((counters for counters in stats.stages if counters.stage == stage), None)


def _in_flight(stats: RouterStats, counters: StageCounters, hosts: Sequence[ReplicaStats]) -> int:
    """Sessions of a looping pipeline hold a slot at every stage; its counters know the entry only."""
    if stats.execution == "looping":
        return sum(replica.held_slots for replica in hosts)
    return counters.in_flight


def _rate_and_cv(
    begin: StageCounters | None, end: StageCounters, span_s: float
) -> tuple[float | None, float | None]:
    if begin is None or span_s <= 0:
        return None, None
    count = end.arrivals - begin.arrivals
    gap_sum_s = end.gap_sum_s - begin.gap_sum_s
    if count < MIN_ARRIVALS or gap_sum_s <= 0:
        return count / span_s, None
    mean_s = gap_sum_s / count
    scv = (end.gap_sq_sum_s2 - begin.gap_sq_sum_s2) / count / (mean_s * mean_s) - 1
    return count / span_s, math.sqrt(max(scv, 0.0))


def _busy_ratio(previous: RouterStats | None, stats: RouterStats, stage: int) -> float | None:
    if previous is None or stats.at_s <= previous.at_s:
        return None
    before = {replica.replica: replica for replica in previous.replicas}
    used_s, ready = 0.0, 0
    for replica in stats.replicas:
        if stage not in replica.stages or replica.state != "ready":
            continue
        ready += 1
        place = replica.stages.index(stage)
        earlier = before.get(replica.replica)
        if earlier is not None and place < len(replica.busy_s) and place < len(earlier.busy_s):
            used_s += max(replica.busy_s[place] - earlier.busy_s[place], 0.0)
    return used_s / ready / (stats.at_s - previous.at_s) if ready else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

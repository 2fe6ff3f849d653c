"""The best static allocation: replica numbers that never change, chosen knowing the mean load.

Before it: an experiment names the rates. After it: `SetReplicas` once. It is the "controller off" of the
experiments: equal replica-seconds, no reaction. Of all allocations of a number of replicas to the stages of
a chain it takes the one with the least mean latency by the G/G/c model (`maths.erlang`): waits are convex
and falling in the number of servers, so giving one replica at a time to the stage where it saves most is
exact. Unlike the rivals it is told the mean rate and the CV: it needs them, and a reference may.

Service time of a stage: the mean time an item takes a replica at the largest batch within half of the
stage's part of the objective, as everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import msgspec

from keystage.baselines.bounds import actions, bounded
from keystage.baselines.seen import Seen, Watch, batch_within, rate_rps, shares_s
from keystage.baselines.tunable import Ranges
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import PipelineView, Snapshot
from keystage.controller.maths.erlang import ggc_wait_s


class StaticSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the load.

    Attributes:
        rates_rps: mean rate by pipeline; one without an entry is left alone.
        arrival_scv: squared CV of the gaps between arrivals.
        service_scv: squared CV of service times.
        replicas: replicas in all of each pipeline, None: `effort` times the offered load, rounded up, but
            at least what is stable.
        slo_service_ratio: objective in service times where the pipeline states none.
        effort: replicas per erlang of offered load where `replicas` does not say; 1.4: utilisation 0.7.
    """

    rates_rps: Mapping[str, float] = {}
    arrival_scv: float = 1.0
    service_scv: float = 0.0
    replicas: int | None = None
    slo_service_ratio: float = 10.0
    effort: float = 1.4


RANGES: Ranges = {}
"""Nothing to tune: it is the best of its kind already."""


def allocate(
    rate_rps_: float, services_s: Sequence[float], arrival_scv: float, service_scv: float, total: int
) -> list[int]:
    """The allocation of `total` replicas with the least mean wait summed over a chain.

    Args:
        rate_rps_: mean arrival rate at every stage.
        services_s: seconds an item takes a replica, by stage, each above 0.
        arrival_scv: squared CV of arrivals.
        service_scv: squared CV of services.
        total: replicas to be given; each stage gets 1 at least.

    Returns:
        Replicas by stage. First every stage is made stable (the most utilised first); then each replica goes
        where it saves most. Too few for stability: utilisations are made as equal as can be.
    """
    counts = [1] * len(services_s)
    loads = [rate_rps_ * s for s in services_s]
    for _ in range(total - len(counts)):
        ratio, stage = max((load / c, -k) for k, (load, c) in enumerate(zip(loads, counts, strict=True)))
        if ratio < 1:
            break
        counts[-stage] += 1
    if any(load >= c for load, c in zip(loads, counts, strict=True)):
        return counts

    def gain(stage: int) -> tuple[float, int]:
        now, more = (
            ggc_wait_s(rate_rps_, services_s[stage], counts[stage] + extra, arrival_scv, service_scv)
            for extra in (0, 1)
        )
        return more - now, stage

    heap = [gain(stage) for stage in range(len(counts))]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, stage = heap[0]
        counts[stage] += 1
        heapq.heapreplace(heap, gain(stage))
    return counts


class Static:
    """The steering.

    Args:
        settings: what is known of the load.
    """

    def __init__(self, settings: StaticSettings) -> None:
        self._settings = settings
        self._watch = Watch()
        self._allocations: dict[str, list[int]] = {}

    def steer(self, snapshot: Snapshot) -> list[SetReplicas]:
        """See `Steering.steer`."""
        wishes: list[tuple[Seen, int]] = []
        for view, seen in self._watch.pipelines(snapshot):
            rate = self._settings.rates_rps.get(view.pipeline)
            if rate is None or not math.isfinite(rate) or rate < 0:
                continue
            if view.pipeline not in self._allocations:
                self._allocations[view.pipeline] = self._allocated(view, seen, rate)
            counts = self._allocations[view.pipeline]
            wishes += [(s, bounded(s.scale, c)) for s, c in zip(seen, counts, strict=True)]
        return actions(snapshot, wishes)

    def _allocated(self, view: PipelineView, seen: tuple[Seen, ...], rate: float) -> list[int]:
        settings = self._settings
        parts_s = shares_s(view, seen, settings.slo_service_ratio)
        services_s = [
            1 / rate_rps(s.batch, batch_within(s.batch, part_s / 2))
            for s, part_s in zip(seen, parts_s, strict=True)
        ]
        stable = sum(math.floor(rate * s) + 1 for s in services_s)
        asked = settings.replicas
        total = max(stable, math.ceil(settings.effort * rate * sum(services_s))) if asked is None else asked
        return allocate(rate, services_s, settings.arrival_scv, settings.service_scv, max(total, len(seen)))

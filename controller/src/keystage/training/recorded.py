"""Examples from recorded runs: what the routers of a real pipeline counted.

Before it: `decisions.jsonl` of a controller. After it: `fit` learns from them with the simulated ones. A
window is a stretch of the log in which the replicas of a pipeline stayed as they were, all ready, and
no router began anew; its counters' growth gives rate, services and CV of every stage. A window counts
if it has enough arrivals for its CV (as for the estimator, 20 CV^2) and no queue that only grew.
Looping pipelines are left out: their rings are closed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from keystage.controller.decisions import Record
from keystage.controller.domain.snapshot import PipelineView, StageView
from keystage.controller.maths.estimator import is_number
from keystage.controller.maths.qna import Station
from keystage.training.dataset import Example
from keystage.wire.unreadable import UNREADABLE

LEAST_ARRIVALS = 200
ARRIVALS_PER_SCV = 20
MOST_UTILISATION = 0.98
"""A window fuller than this was not in steady state."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Totals:
    """Counters of one stage summed over routers."""

    at_s: float
    arrivals: float
    gap_s: float
    gap_s2: float
    services: float
    service_s: float
    service_s2: float


def read(path: Path) -> list[Example]:
    """Examples of every usable window of a decisions log.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not a decision.
    """
    return list(examples(_snapshots(path)))


def _snapshots(path: Path) -> Iterator[tuple[PipelineView, ...]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield msgspec.json.decode(line, type=Record).snapshot.pipelines
            except UNREADABLE as error:
                raise ValueError(f"{path} line {number} is not a decision: {error}") from error


def examples(snapshots: Iterable[tuple[PipelineView, ...]]) -> Iterator[Example]:
    """Examples from snapshots in the order they were taken."""
    began: dict[str, tuple[object, PipelineView]] = {}
    latest: dict[str, PipelineView] = {}
    for views in snapshots:
        for view in views:
            if view.execution == "looping":
                continue
            key = _key(view)
            first = began.get(view.pipeline)
            if first is not None and first[0] != key:
                yield from _example(first[1], latest[view.pipeline])
                del began[view.pipeline]
            if key is not None:
                began.setdefault(view.pipeline, (key, view))
                latest[view.pipeline] = view
    for name, (_, view) in began.items():
        yield from _example(view, latest[name])


def _key(view: PipelineView) -> object:
    """What must stay the same inside a window; None where no window can be."""
    if view.missing or any(s.scale.starting or s.scale.ready < 1 or not s.routers for s in view.stages):
        return None
    return tuple((s.scale.ready, tuple(r.incarnation for r in s.routers)) for s in view.stages)


def _example(first: PipelineView, last: PipelineView) -> Iterator[Example]:
    stations, cvs = [], []
    for before, after in zip(first.stages, last.stages, strict=True):
        counted = _counted(before, after)
        if counted is None:
            return
        stations.append(counted[0])
        cvs.append(counted[1])
    if len(stations) >= 2:
        yield Example(tuple(stations), tuple(cvs))


def _counted(before: StageView, after: StageView) -> tuple[Station, float] | None:
    old, new = _totals(before), _totals(after)
    if old is None or new is None:
        return None
    span_s, arrivals, gap_s, gap_s2, services, service_s, service_s2 = (
        getattr(new, f.name) - getattr(old, f.name) for f in dataclasses.fields(_Totals)
    )
    if min(span_s, gap_s, service_s) <= 0 or min(arrivals, services) < LEAST_ARRIVALS:
        return None
    scv = max(0.0, arrivals * gap_s2 / gap_s**2 - 1)
    mean_s = service_s / services
    batch = after.batch
    most = batch.most if batch is not None else 1
    full_s = batch.alpha_s * most + batch.beta_s if batch is not None else mean_s
    utilisation = arrivals / span_s * full_s / most / after.scale.ready
    if arrivals < ARRIVALS_PER_SCV * scv or not 0 < utilisation < MOST_UTILISATION:
        return None
    station = Station(
        utilisation=utilisation,
        servers=after.scale.ready,
        service_scv=max(0.0, services * service_s2 / service_s**2 - 1) if most == 1 else 0.0,
        most=most,
        fixed_ratio=batch.beta_s / (batch.alpha_s + batch.beta_s) if batch is not None else 0.0,
    )
    return station, math.sqrt(scv)


def _totals(stage: StageView) -> _Totals | None:
    rows = []
    for router in stage.routers:
        c = router.counters
        row = (
            router.at_s,
            c.arrivals,
            c.gap_sum_s,
            c.gap_sq_sum_s2,
            c.services,
            c.service_sum_s,
            c.service_sq_sum_s2,
        )
        numbers = [v for v in row if is_number(v)]
        if len(numbers) < len(row):
            return None
        rows.append(numbers)
    at_s = sum(row[0] for row in rows) / len(rows)
    return _Totals(at_s, *(sum(row[i] for row in rows) for i in range(1, 7)))

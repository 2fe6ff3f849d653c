"""The spans of one trail, written one by one: of whatever `router.trace_tables` has no table for.

Before it: `router.traces` chooses. After it: `wire.tracing` sends. These are requests to which something
happened: they waited for a replica's start, moved to another path, were refused, or turned many times through
a module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from keystage.router.trails import SPREAD, Binding, Trail, Visit, spread, unpacked
from keystage.wire import spans
from keystage.wire.tracing import Tracer

GAPS = spans.Doubles(*(f"keystage.gap.{what}" for what in SPREAD))
"""Of the times between two tokens."""
STEPS = spans.Doubles(
    *(f"keystage.{of}.{what}" for of in ("handoff", "compute") for what in SPREAD), "keystage.compute.first_s"
)
"""Of a stage's steps."""
_TURNS = spans.Doubles(
    *(f"keystage.{of}.{what}" for of in ("queue", "handoff", "compute") for what in SPREAD)
)
MOST_NAMED = 4096
"""Pairs of stage and worker whose attributes are kept, and paths: workers come and go."""


class Names:
    """What stages and workers are called in spans.

    Args:
        pipeline: name of the pipeline.
        modules: names of a stream program's modules, by stage; empty: stages have numbers.
        replica_of: name of the worker at an address.

    Attributes:
        pipeline: as an attribute.
    """

    def __init__(self, pipeline: str, modules: Sequence[str], replica_of: Callable[[str], str]) -> None:
        self.pipeline = spans.attribute("keystage.pipeline", pipeline)
        self._modules = modules
        self._replica_of = replica_of
        self._named: dict[tuple[int, str], bytes] = {}
        self._paths: set[tuple[str, ...]] = set()

    def span(self, stage: int, last: int) -> str:
        """Name of the span of stages that are run as one."""
        if self._modules:
            return f"module {self._modules[stage]}"
        return f"stage {stage}" if stage == last else f"stage {stage}-{last}"

    def of(self, stage: int, address: str) -> bytes:
        """Attributes of a stage, and of a worker where it has an address."""
        known = self._named.get((stage, address))
        if known is None:
            known = self.pipeline + spans.attribute("keystage.stage", stage)
            if address:
                known += spans.attribute("keystage.replica", self._replica_of(address))
            if len(self._named) >= MOST_NAMED:
                self._named.clear()
                self._paths.clear()
            self._named[stage, address] = known
        return known

    def keep(self, addresses: tuple[str, ...]) -> None:
        """Learns the names of a path's workers while they are there."""
        if addresses not in self._paths:
            for stage, address in enumerate(addresses):
                self.of(stage, address)
            self._paths.add(addresses)


class Writer:
    """Writes spans of trails.

    Args:
        tracer: takes them.
        names: what is called how.
    """

    def __init__(self, tracer: Tracer, names: Names) -> None:
        self._tracer = tracer
        self._names = names

    # ------------------------------------------------------------ late-bound items and turns

    def visit(self, trail: Trail, visit: Visit) -> None:
        """One visit at a stage."""
        name = self._names.span(visit.stage, visit.last)
        more = self._names.of(visit.stage, visit.worker)
        begun_s = visit.done_s - min(visit.compute_s, visit.done_s - visit.sent_s)
        self._queue(trail, f"{name} queue", visit.queued_s, visit.sent_s, visit.stage, visit)
        self._span(trail, f"{name} hand-off", visit.sent_s, begun_s, more)
        self._span(trail, f"{name} compute", begun_s, visit.done_s, more)

    def visits(self, trail: Trail, stage: int, visits: Sequence[Visit]) -> None:
        """Many rounds through one module make one span."""
        more = self._names.of(stage, visits[-1].worker) + spans.attribute("keystage.turns", len(visits))
        queues_s = spread([visit.sent_s - visit.queued_s for visit in visits])
        handoffs_s = spread([visit.handoff_s for visit in visits])
        computes_s = spread([visit.compute_s for visit in visits])
        more += _TURNS.written((*queues_s, *handoffs_s, *computes_s))
        last = max(visit.last for visit in visits)
        name = self._names.span(stage, last)
        self._span(trail, name, visits[0].queued_s, visits[-1].done_s, more)

    def unanswered(self, trail: Trail, why: str | None) -> None:
        """A request that ended without an answer, or without the rest of it, since it was heard of last."""
        since_s = trail.begun_s
        if trail.visits:
            since_s = trail.visits[-1].done_s
        elif trail.bindings:
            since_s = unpacked(trail.steps[-1])[0] if trail.steps else trail.bindings[-1].at_s
        self._span(trail, "unanswered", since_s, time.monotonic(), self._names.pipeline, error=why)

    def _queue(self, trail: Trail, name: str, since_s: float, until_s: float, stage: int, by: Visit) -> None:
        more = self._names.of(stage, "") + spans.attribute("keystage.cold_start", by.is_cold)
        own = self._span(trail, name, since_s, until_s, more)
        if by.is_cold:
            more = self._names.of(stage, by.worker)
            self._span(trail, "cold start", since_s, by.ready_s, more, under=own)

    # ------------------------------------------------------------ looping sessions

    def looping(self, trail: Trail) -> None:
        """A looping request that had a path."""
        bindings, steps = trail.bindings, [unpacked(step) for step in trail.steps]
        first, path = bindings[0], bindings[-1]
        self._bound(trail, first)
        end_s = steps[-1][0] if steps else time.monotonic()
        if not steps:
            self._span(trail, "prefill", first.at_s, end_s, self._names.pipeline)
            return
        paths = spans.attribute("keystage.paths", len(bindings) + trail.moves)
        more = self._names.pipeline + paths
        self._span(trail, "prefill", first.at_s, steps[0][0], more)
        gaps_s = [after[0] - before[0] for before, after in pairwise(steps)]
        if gaps_s:
            more += spans.attribute("keystage.steps", len(gaps_s)) + GAPS.written(spread(gaps_s))
            self._span(trail, "decode", steps[0][0], end_s, more)
        width = 1 + 2 * len(path.addresses)
        columns = list(zip(*[step for step in steps if len(step) == width], strict=True))
        for stage, address in enumerate(path.addresses):
            more = self._names.of(stage, address)
            if columns:
                handoffs_s, computes_s = columns[2 * stage + 1], columns[2 * stage + 2]
                more += spans.attribute("keystage.steps", len(computes_s))
                more += STEPS.written((*spread(handoffs_s), *spread(computes_s), computes_s[0]))
            self._span(trail, self._names.span(stage, stage), first.at_s, end_s, more)

    def _bound(self, trail: Trail, first: Binding) -> None:
        """The wait for a path, and for the worker of it that was ready last."""
        slowest = max(range(len(first.ready_s)), key=first.ready_s.__getitem__)
        waited = Visit(
            slowest,
            slowest,
            trail.begun_s,
            first.at_s,
            first.at_s,
            0.0,
            first.addresses[slowest],
            first.ready_s[slowest],
        )
        self._queue(trail, "queue", trail.begun_s, first.at_s, slowest if waited.is_cold else 0, waited)

    def _span(
        self,
        trail: Trail,
        name: str,
        start_s: float,
        end_s: float,
        more: bytes,
        *,
        under: bytes = b"",
        error: str | None = None,
    ) -> bytes:
        tracer, own = self._tracer, self._tracer.new_id()
        start_ns, end_ns = tracer.unix_ns(start_s), tracer.unix_ns(end_s)
        parent = under or trail.parent_id
        tracer.add(spans.span(trail.trace_id, own, parent, name, start_ns, end_ns, more, error=error))
        return own

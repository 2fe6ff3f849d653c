"""Traces of requests at the router: one span a request, and spans of its way through the stages.

Before it: the HTTP face begins the span of a request (`Entry`), the cores note what happened in a
`trails.Trail`. After it: `wire.tracing` sends. Nothing here runs while traces are off.

| span | from, to |
|---|---|
| `POST /v1/completions` (the path) | the request's head, its answer's end |
| `stage 2 queue` | the item waits, it is sent to a worker |
| `stage 2 hand-off` | it is sent, compute begins (message back included) |
| `stage 2 compute` | the worker's compute |
| `cold start` | in a queue: the item waits, the worker that took it is ready |
| `queue` (looping) | admitted, bound to a path |
| `prefill` (looping) | bound, first token |
| `decode` (looping) | first token, last; steps and gaps as percentiles |
| `stage 2` (looping), `module NAME` (many turns) | first begin, last end; hand-off, compute as percentiles |
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise

from keystage.router.engine import Refusal
from keystage.router.face_http import ClientGone, Receive, Scope, Send, header
from keystage.router.trails import SPREAD, Trail, Visit, spread
from keystage.wire import spans
from keystage.wire.traceparent import HEADER
from keystage.wire.tracing import Tracer

CLIENT_GONE = 499
"""Status in the span of a request whose client went away."""


class Entry:
    """The span of one HTTP request.

    Attributes:
        parent: by which what happens within it names it.
        status: of the answer.
    """

    __slots__ = ("_begun_s", "_path", "_tracer", "_under", "parent", "status")

    def __init__(self, tracer: Tracer, traceparent: bytes | None, path: str) -> None:
        self.parent, self._under = tracer.begin(traceparent)
        self._tracer = tracer
        self._path = path
        self._begun_s = time.monotonic()
        self.status = 200

    def end(self) -> None:
        """The request has ended."""
        parent, tracer = self.parent, self._tracer
        if not parent.is_sampled:
            return
        more = _METHOD + spans.attribute("url.path", self._path)
        more += spans.attribute("http.response.status_code", self.status)
        error = f"status {self.status}" if self.status >= 500 else None
        tracer.add(
            spans.span(
                parent.trace_id,
                parent.span_id,
                self._under,
                f"POST {self._path}",
                tracer.unix_ns(self._begun_s),
                tracer.unix_ns(time.monotonic()),
                more,
                spans.SERVER,
                error,
            )
        )


_METHOD = spans.attribute("http.request.method", "POST")
_GAPS = spans.Doubles(*(f"keystage.gap.{what}" for what in SPREAD))
_STEPS = spans.Doubles(
    *(f"keystage.{of}.{what}" for of in ("handoff", "compute") for what in SPREAD), "keystage.compute.first_s"
)
_TURNS = spans.Doubles(
    *(f"keystage.{of}.{what}" for of in ("queue", "handoff", "compute") for what in SPREAD)
)
MOST_NAMED = 4096
"""Pairs of stage and worker whose attributes are kept; workers come and go."""
_entry: ContextVar[Entry | None] = ContextVar("keystage_entry", default=None)


@lru_cache(maxsize=4096)
def _steps(count: int) -> bytes:
    return spans.attribute("keystage.steps", count)


async def traced(
    tracer: Tracer, handler: Callable[..., Awaitable[None]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Serves a POST at a known path, with a span around it; raises what the handler raises."""
    entry = Entry(tracer, header(scope, HEADER), scope["path"])
    _entry.set(entry)
    try:
        await handler(scope, receive, send)
    except Refusal as refusal:
        entry.status = refusal.status
        raise
    except ClientGone:
        entry.status = CLIENT_GONE
        raise
    except Exception:
        entry.status = 500
        raise
    finally:
        entry.end()


class Traces:
    """Makes spans of trails.

    Args:
        tracer: sends them.
        pipeline: name of the pipeline.
        modules: names of a stream program's modules, by stage; empty: stages have numbers.
        replica_of: name of the worker at an address.
    """

    def __init__(
        self, tracer: Tracer, pipeline: str, modules: Sequence[str], replica_of: Callable[[str], str]
    ) -> None:
        self._tracer = tracer
        self._pipeline = spans.attribute("keystage.pipeline", pipeline)
        self._modules = modules
        self._replica_of = replica_of
        self._named: dict[tuple[int, str], bytes] = {}

    def begin(self, now_s: float) -> Trail | None:
        """A trail for a request of the present task; None where its trace is not recorded."""
        entry = _entry.get()
        if entry is None or not entry.parent.is_sampled:
            return None
        return Trail(entry.parent.trace_id, entry.parent.span_id, now_s)

    def end(self, trail: Trail, error: BaseException | None) -> None:
        """The request has its answer, or has none."""
        why = str(error) if isinstance(error, Refusal) else None
        if trail.bindings:
            self._looping(trail)
        if why or not (trail.visits or trail.bindings):
            self._unanswered(trail, why)
        by_stage: dict[int, list[Visit]] = {}
        for visit in trail.visits:
            by_stage.setdefault(visit.stage, []).append(visit)
        for stage, visits in by_stage.items():
            if len(visits) == 1:
                self._visit(trail, visits[0])
            else:
                self._visits(trail, stage, visits)

    # ------------------------------------------------------------ late-bound items and turns

    def _visit(self, trail: Trail, visit: Visit) -> None:
        name = self._name(visit.stage, visit.last)
        more = self._of(visit.stage, visit.worker)
        begun_s = visit.done_s - min(visit.compute_s, visit.done_s - visit.sent_s)
        self._queue(trail, f"{name} queue", visit.queued_s, visit.sent_s, visit.stage, visit)
        self._span(trail, f"{name} hand-off", visit.sent_s, begun_s, more)
        self._span(trail, f"{name} compute", begun_s, visit.done_s, more)

    def _visits(self, trail: Trail, stage: int, visits: Sequence[Visit]) -> None:
        """Many rounds through one module make one span."""
        more = self._of(stage, visits[-1].worker) + spans.attribute("keystage.turns", len(visits))
        queues_s = spread([visit.sent_s - visit.queued_s for visit in visits])
        handoffs_s = spread([visit.handoff_s for visit in visits])
        computes_s = spread([visit.compute_s for visit in visits])
        more += _TURNS.written((*queues_s, *handoffs_s, *computes_s))
        last = max(visit.last for visit in visits)
        self._span(trail, self._name(stage, last), visits[0].queued_s, visits[-1].done_s, more)

    def _unanswered(self, trail: Trail, why: str | None) -> None:
        """A request that ended without an answer, or without the rest of it, since it was heard of last."""
        since_s, more = trail.begun_s, self._pipeline
        if trail.visits:
            since_s = trail.visits[-1].done_s
        elif trail.bindings:
            since_s = trail.steps[-1][0] if trail.steps else trail.bindings[-1].at_s
        self._span(trail, "unanswered", since_s, time.monotonic(), more, error=why)

    def _queue(
        self, trail: Trail, name: str, since_s: float, until_s: float, stage: int, cold: Visit | None
    ) -> None:
        is_cold = cold is not None and cold.is_cold
        more = self._of(stage, "") + spans.attribute("keystage.cold_start", is_cold)
        own = self._span(trail, name, since_s, until_s, more)
        if cold is not None and is_cold:
            self._span(trail, "cold start", since_s, cold.ready_s, self._of(stage, cold.worker), under=own)

    # ------------------------------------------------------------ looping sessions

    def _looping(self, trail: Trail) -> None:
        bindings, steps = trail.bindings, trail.steps
        first, path = bindings[0], bindings[-1]
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
        end_s = steps[-1][0] if steps else time.monotonic()
        if not steps:
            self._span(trail, "prefill", first.at_s, end_s, self._pipeline)
            return
        more = self._pipeline + spans.attribute("keystage.paths", len(bindings) + trail.moves)
        self._span(trail, "prefill", first.at_s, steps[0][0], more)
        gaps_s = [after[0] - before[0] for before, after in pairwise(steps)]
        if gaps_s:
            more += _steps(len(gaps_s)) + _GAPS.written(spread(gaps_s))
            self._span(trail, "decode", steps[0][0], end_s, more)
        width = 2 * len(path.addresses)
        columns = list(zip(*[times for _, times in steps if len(times) == width], strict=True))
        for stage, address in enumerate(path.addresses):
            more = self._of(stage, address)
            if columns:
                handoffs_s, computes_s = columns[2 * stage], columns[2 * stage + 1]
                more += _steps(len(computes_s)) + _STEPS.written(
                    (*spread(handoffs_s), *spread(computes_s), computes_s[0])
                )
            self._span(trail, self._name(stage, stage), first.at_s, end_s, more)

    # ------------------------------------------------------------ inside

    def _name(self, stage: int, last: int) -> str:
        if self._modules:
            return f"module {self._modules[stage]}"
        return f"stage {stage}" if stage == last else f"stage {stage}-{last}"

    def _of(self, stage: int, address: str) -> bytes:
        known = self._named.get((stage, address))
        if known is None:
            known = self._pipeline + spans.attribute("keystage.stage", stage)
            if address:
                known += spans.attribute("keystage.replica", self._replica_of(address))
            if len(self._named) >= MOST_NAMED:
                self._named.clear()
            self._named[stage, address] = known
        return known

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

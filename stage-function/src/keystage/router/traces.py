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

from keystage.router.engine import Refusal
from keystage.router.face_http import ClientGone, Receive, Scope, Send, header
from keystage.router.trace_spans import MOST_NAMED, Names, Writer
from keystage.router.trace_tables import Call, Item, Items, Stream, Streams, calls
from keystage.router.trails import Trail, Visit
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
        trace_id, span_id, is_sampled = self.parent
        if is_sampled:
            record = Call(trace_id, span_id, self._under, self._begun_s, time.monotonic())
            self._tracer.note(calls(self._path, self.status, not self._under), record)


STEP_BYTES = 48
"""What a step takes beside its numbers; those of a wave are one for all its sessions."""
_entry: ContextVar[Entry | None] = ContextVar("keystage_entry", default=None)


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
    """Makes spans of trails: a record of what went as it should, spans of the rest.

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
        self._names = Names(pipeline, modules, replica_of)
        self._writer = Writer(tracer, self._names)
        self._streams: dict[tuple[int, bool], Streams] = {}
        self._items: dict[tuple[int, int, str], Items] = {}

    def begin(self, now_s: float) -> Trail | None:
        """A trail for a request of the present task; None where its trace is not recorded."""
        entry = _entry.get()
        if entry is None or not entry.parent.is_sampled:
            return None
        return Trail(entry.parent.trace_id, entry.parent.span_id, now_s)

    def end(self, trail: Trail, error: BaseException | None) -> None:
        """The request has its answer, or has none."""
        why = str(error) if isinstance(error, Refusal) else None
        if trail.bindings and not self._is_noted(trail):
            self._writer.looping(trail)
        if why or not (trail.visits or trail.bindings):
            self._writer.unanswered(trail, why)
        if trail.visits:
            self._visits(trail)

    def _is_noted(self, trail: Trail) -> bool:
        """Leaves a record of a looping request; not where it moved, waited for a start, or misses times."""
        at_s, addresses, ready_s = trail.bindings[0]
        steps = trail.steps
        if not steps or trail.moves or len(trail.bindings) > 1 or max(ready_s) > trail.begun_s:
            return False
        row = 8 * (1 + 2 * len(addresses))
        if set(map(len, steps)) != {row}:
            return False
        self._names.keep(addresses)
        kind = len(addresses), len(steps) > 1
        streams = self._streams.get(kind)
        if streams is None:
            streams = self._streams[kind] = Streams(self._names, kind[0], is_long=kind[1])
        record = Stream(trail.trace_id, trail.parent_id, trail.begun_s, at_s, addresses, steps)
        self._tracer.note(streams, record, len(steps) * (STEP_BYTES + row))
        return True

    def _visits(self, trail: Trail) -> None:
        by_stage: dict[int, list[Visit]] = {}
        for visit in trail.visits:
            by_stage.setdefault(visit.stage, []).append(visit)
        for stage, visits in by_stage.items():
            if len(visits) > 1:
                self._writer.visits(trail, stage, visits)
            elif visits[0].is_cold:
                self._writer.visit(trail, visits[0])
            else:
                self._note(trail, visits[0])

    def _note(self, trail: Trail, visit: Visit) -> None:
        stage, last, queued_s, sent_s, done_s, compute_s, worker, _ = visit
        items = self._items.get((stage, last, worker))
        if items is None:
            if len(self._items) >= MOST_NAMED:
                self._items.clear()
            items = self._items[stage, last, worker] = Items(self._names, stage, last, worker)
        self._tracer.note(items, Item(trail.trace_id, trail.parent_id, queued_s, sent_s, done_s, compute_s))

"""The spans of ordinary requests, written many at once (`wire.span_tables`).

Before it: `router.traces` leaves a record, a tuple, of each request that ended; the thread of `wire.tracing`
hands over all of a second. After it: bytes of spans, those that `router.trace_spans` would have written. Sums
and percentiles of steps are columns, too: requests whose numbers of steps have the same next power of two are
one array, those with fewer filled up with infinity, which sorts behind every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keystage.router.trace_spans import GAPS, MOST_NAMED, STEPS, Names
from keystage.wire import spans
from keystage.wire.span_body import Body
from keystage.wire.span_tables import SPAN_ID, TRACE_ID, Count, SpanTable, ids, width_of
from keystage.wire.tracing import Tracer

MOST_VALUES = 1 << 19
"""Numbers of one array of steps: 4 MB."""
_WARM = spans.attribute("keystage.cold_start", False)
_METHOD = spans.attribute("http.request.method", "POST")
Times = NDArray[np.float64]
Counts = NDArray[np.int64]


class Call(NamedTuple):
    """A request at the HTTP face."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    begun_s: float
    end_s: float


class Calls:
    """Spans of HTTP requests with the same path and status.

    Args:
        path: of the URL.
        status: of the answer.
        is_first: whether they are the first of their traces.
    """

    spans = 1

    def __init__(self, path: str, status: int, *, is_first: bool) -> None:
        more = _METHOD + spans.attribute("url.path", path)
        more += spans.attribute("http.response.status_code", status)
        error = f"status {status}" if status >= 500 else None
        self._table = SpanTable(f"POST {path}", [more], spans.SERVER, error, is_first=is_first)
        self._is_first = is_first

    def write(self, records: Sequence[Call], body: Body, tracer: Tracer) -> None:
        """See `wire.tracing.Maker`."""
        traces, own, parents, begun_s, end_s = zip(*records, strict=True)
        self._table.write(
            body,
            ids(traces, TRACE_ID),
            ids(own, SPAN_ID),
            None if self._is_first else ids(parents, SPAN_ID),
            _ns(np.array(begun_s), tracer),
            _ns(np.array(end_s), tracer),
        )


@lru_cache(maxsize=1024)
def calls(path: str, status: int, is_first: bool) -> Calls:
    """Those with this path and status; paths are those of the face."""
    return Calls(path, status, is_first=is_first)


class Item(NamedTuple):
    """An item at a stage that it did not have to wait for."""

    trace_id: bytes
    parent_id: bytes
    queued_s: float
    sent_s: float
    done_s: float
    compute_s: float


class Items:
    """Spans of items at a worker.

    Args:
        names: what is called how.
        stage: first stage.
        last: last stage.
        worker: its address.
    """

    spans = 3

    def __init__(self, names: Names, stage: int, last: int, worker: str) -> None:
        name, more = names.span(stage, last), names.of(stage, worker)
        self._queue = SpanTable(f"{name} queue", [names.of(stage, ""), _WARM])
        self._handoff = SpanTable(f"{name} hand-off", [more])
        self._compute = SpanTable(f"{name} compute", [more])

    def write(self, records: Sequence[Item], body: Body, tracer: Tracer) -> None:
        """See `wire.tracing.Maker`."""
        traces, parents, *times = zip(*records, strict=True)
        queued_s, sent_s, done_s, compute_s = np.array(times)
        begun_s = done_s - np.minimum(compute_s, done_s - sent_s)
        to = _Spans(ids(traces, TRACE_ID), ids(parents, SPAN_ID), body, tracer)
        to.write(self._queue, queued_s, sent_s)
        to.write(self._handoff, sent_s, begun_s)
        to.write(self._compute, begun_s, done_s)


class Stream(NamedTuple):
    """A looping request that kept its path; all its `steps` (`trails.packed`) have times."""

    trace_id: bytes
    parent_id: bytes
    begun_s: float
    bound_s: float
    addresses: tuple[str, ...]
    steps: list[bytes]


class Streams:
    """Spans of looping requests.

    Args:
        names: what is called how; knows the workers of the records.
        stages: of the pipeline.
        is_long: whether they have more than one token.

    Attributes:
        spans: see `wire.tracing.Maker`.
    """

    def __init__(self, names: Names, stages: int, *, is_long: bool) -> None:
        self.spans = 2 + is_long + stages
        self._names = names
        self._stages = stages
        self._row = 1 + 2 * stages
        self._memory = bytearray()
        self._is_long = is_long
        one = names.pipeline + spans.attribute("keystage.paths", 1)
        self._queue = SpanTable("queue", [names.of(0, ""), _WARM])
        self._prefill = SpanTable("prefill", [one])
        self._decode = cache(lambda width: SpanTable("decode", [one, Count("keystage.steps", width), GAPS]))
        self._stage = lru_cache(maxsize=MOST_NAMED)(self._stage_table)

    def write(self, records: Sequence[Stream], body: Body, tracer: Tracer) -> None:
        """See `wire.tracing.Maker`."""
        alike: dict[tuple[int, int, int], list[Stream]] = {}
        for record in records:
            steps = len(record.steps)
            room = 1 << (steps - 1).bit_length()
            alike.setdefault((room, width_of(steps), width_of(steps - 1)), []).append(record)
        for (room, width, less), group in alike.items():
            most = max(1, MOST_VALUES // (room * self._row))
            for at in range(0, len(group), most):
                self._write(group[at : at + most], room, width, less, body, tracer)

    def _write(
        self, records: list[Stream], room: int, width: int, less: int, body: Body, tracer: Tracer
    ) -> None:
        traces, parents, begun, bound, paths, steps = zip(*records, strict=True)
        to = _Spans(ids(traces, TRACE_ID), ids(parents, SPAN_ID), body, tracer)
        begun_s, bound_s, count = np.array(begun), np.array(bound), np.array(list(map(len, steps)))
        times_s = self._times(steps, room)
        at_s = times_s[:, :, 0]
        first_s, last_s = at_s[:, 0].copy(), at_s[np.arange(len(records)), count - 1]
        to.write(self._queue, begun_s, bound_s)
        to.write(self._prefill, bound_s, first_s)
        if self._is_long:
            with np.errstate(invalid="ignore"):  # infinity less infinity is not a number, and sorts last
                gaps_s = at_s[:, 1:] - at_s[:, :-1]
            told = _spread(gaps_s[:, :, None], count - 1)[:, 0]
            to.write(self._decode(less), first_s, last_s, count - 1, told)
        computes_s = times_s[:, 0, 2::2, None].copy()
        told = _spread(times_s[:, :, 1:], count).reshape(len(records), self._stages, 8)
        numbers = np.concatenate((told, computes_s), axis=2)
        by_path: dict[tuple[str, ...], list[int]] = {}
        for number, path in enumerate(paths):
            by_path.setdefault(path, []).append(number)
        for stage in range(self._stages):
            if len(by_path) == 1:
                table = self._stage(stage, paths[0][stage], width)
                to.write(table, bound_s, last_s, count, numbers[:, stage])
                continue
            by_worker: dict[str, list[int]] = {}
            for path, those in by_path.items():
                by_worker.setdefault(path[stage], []).extend(those)
            for address, those in by_worker.items():
                table = self._stage(stage, address, width)
                some = numbers[those, stage]
                to.of(those).write(table, bound_s[those], last_s[those], count[those], some)

    def _times(self, steps: Sequence[list[bytes]], room: int) -> Times:
        """(N, room, 1 + 2 stages), filled up, in memory that is kept: new pages cost more than their use."""
        bytes_each, values = 8 * room * self._row, len(steps) * room * self._row
        memory = self._memory
        if len(memory) < 8 * values:
            memory = bytearray(8 * values)
            if values <= MOST_VALUES:  # more than that is one very long request
                self._memory = memory
        times_s = np.frombuffer(memory, count=values)
        times_s.fill(math.inf)
        view = memoryview(memory)
        for number, each in enumerate(steps):
            packed, at = b"".join(each), number * bytes_each
            view[at : at + len(packed)] = packed
        return times_s.reshape(len(steps), room, self._row)

    def _stage_table(self, stage: int, address: str, width: int) -> SpanTable:
        name = self._names.span(stage, stage)
        return SpanTable(name, [self._names.of(stage, address), Count("keystage.steps", width), STEPS])


class _Spans(NamedTuple):
    """Spans of the same traces, under the same parents, each with an id of its own."""

    traces: NDArray[np.void]
    parents: NDArray[np.void]
    body: Body
    tracer: Tracer

    def of(self, numbers: list[int]) -> _Spans:
        """Some of the traces."""
        return self._replace(traces=self.traces[numbers], parents=self.parents[numbers])

    def write(self, table: SpanTable, start_s: Times, end_s: Times, *values: Times | Counts) -> None:
        traces, parents, body, tracer = self
        own = np.frombuffer(tracer.new_ids(len(start_s)), SPAN_ID)
        table.write(body, traces, own, parents, _ns(start_s, tracer), _ns(end_s, tracer), *values)


def _ns(at_s: Times, tracer: Tracer) -> Counts:
    """See `Tracer.unix_ns`."""
    return (at_s * 1e9).astype(np.int64) + tracer.offset_ns


def _spread(values_s: Times, counts: Counts) -> Times:
    """Of (N, steps, columns) the first `counts` (N,) steps: (N, columns, 4) as `trails.spread` has them.

    The values are sorted in place.
    """
    values_s.sort(axis=1)
    rows = np.arange(len(values_s))
    ranks = (counts - 1) // 2, np.minimum(counts - 1, counts * 95 // 100), counts - 1
    picked = [values_s[rows, rank] for rank in ranks]
    beyond = np.arange(values_s.shape[1]) >= counts[:, None]
    if beyond.any():
        values_s[beyond] = 0.0
    return np.stack((values_s.sum(axis=1), *picked), axis=2)

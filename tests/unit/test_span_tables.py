"""Spans written many at once are, byte by byte, those written one by one, and OpenTelemetry reads its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from keystage.wire import spans
from keystage.wire.span_body import LEAST_BYTES, Body
from keystage.wire.span_tables import SPAN_ID, TRACE_ID, Count, SpanTable, ids, width_of

KEYS = ("keystage.a", "b", "c" * 130)
TIMES = st.integers(0, 2**62)
NUMBERS = st.floats(allow_nan=False)
ROW = st.tuples(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=8, max_size=8),
    TIMES,
    TIMES,
    st.lists(NUMBERS, min_size=3, max_size=3),
    st.integers(0, 2**14 - 1),
)
ROWS = st.lists(ROW, min_size=1, max_size=6)
TEXT = st.text(max_size=300)
ERROR = st.one_of(st.none(), TEXT)


def written(body: Body) -> bytes:
    return bytes(body.whole(b""))


@given(ROWS, TEXT, TEXT, ERROR, st.booleans(), st.sampled_from((spans.INTERNAL, spans.SERVER)))
def test_a_table_writes_what_is_written_one_by_one_and_what_opentelemetry_writes(
    rows: list[Any], name: str, text: str, error: str | None, is_first: bool, kind: int
) -> None:
    numbers = spans.Doubles(*KEYS)
    for width in {width_of(row[6]) for row in rows}:
        some = [row for row in rows if width_of(row[6]) == width]
        traces, own, parents, start, end, values, counts = zip(*some, strict=True)
        more: list[bytes | spans.Doubles | Count] = [
            spans.attribute("text", text),
            numbers,
            Count("keystage.steps", width),
            b"",
        ]
        body = Body(0)
        SpanTable(name, more, kind, error, is_first=is_first).write(
            body,
            ids(traces, TRACE_ID),
            ids(own, SPAN_ID),
            None if is_first else ids(parents, SPAN_ID),
            np.array(start),
            np.array(end),
            np.array(values),
            np.array(counts),
        )
        singly, reference = [], ScopeSpans()
        for trace_id, span_id, parent_id, start_ns, end_ns, three, count in some:
            under = b"" if is_first else parent_id
            told = (
                spans.attribute("text", text)
                + numbers.written(three)
                + spans.attribute("keystage.steps", count)
            )
            singly.append(spans.span(trace_id, span_id, under, name, start_ns, end_ns, told, kind, error))
            span = reference.spans.add(
                trace_id=trace_id,
                span_id=span_id,
                parent_span_id=under,
                name=name,
                kind=kind,
                start_time_unix_nano=start_ns,
                end_time_unix_nano=max(start_ns, end_ns),
            )
            span.attributes.add(key="text").value.string_value = text
            for key, value in zip(KEYS, three, strict=True):
                span.attributes.add(key=key).value.double_value = value
            span.attributes.add(key="keystage.steps").value.int_value = count
            if error is not None:
                span.status.code = span.status.STATUS_CODE_ERROR
                span.status.message = error
        assert written(body) == b"".join(singly)
        read = ScopeSpans()
        read.ParseFromString(written(body))
        assert read == reference


@given(st.integers(0, 2**35))
def test_a_count_takes_as_many_bytes_as_its_varint(count: int) -> None:
    assert len(Count("k", width_of(count)).blank) == len(spans.attribute("k", count))


def test_a_body_grows_and_is_used_again() -> None:
    body = Body(100)
    for value in (1, 2):
        body.clear()
        piece = bytes((value,)) * 1000
        for _ in range(LEAST_BYTES // 500):
            body.add(piece)
        assert len(body) == LEAST_BYTES // 500 * 1000
        assert bytes(body.whole(b"head")) == b"head" + piece * (LEAST_BYTES // 500)
    with pytest.raises(ValueError, match="a head of 101 bytes, and room for 100"):
        body.whole(bytes(101))


@given(st.integers(0, 400))
def test_the_head_of_a_body_counts_what_follows(length: int) -> None:
    resource = spans.resource({"service.name": "s"})
    made = [spans.span(b"t" * 16, b"s" * 8, b"", "n", 1, 2, spans.attribute("a", "x" * length))] * 3
    body = Body(100)
    body.add(b"".join(made))
    whole = bytes(body.whole(spans.export_head(resource, "keystage", "1", len(body))))
    assert whole == spans.export_request(resource, "keystage", "1", made)
    read = ExportTraceServiceRequest()
    read.ParseFromString(whole)
    assert len(read.resource_spans[0].scope_spans[0].spans) == 3

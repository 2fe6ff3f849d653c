"""Spans of ordinary requests, made many at once, are those that are made one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collector import Seen, read

from keystage.router import trace_tables
from keystage.router.trace_spans import Names, Writer
from keystage.router.traces import Entry, Traces
from keystage.router.trails import Binding, Trail, Visit, packed
from keystage.wire.tracing import Tracer

STAGES = 3
WORKERS = st.tuples(*[st.sampled_from((f"a{k}", f"longer-{k}")) for k in range(STAGES)])
SECONDS = st.floats(0, 1e6)
COUNTS = st.one_of(st.integers(1, 20), st.sampled_from((127, 128, 129)))
VISITS = st.lists(
    st.tuples(st.integers(0, 2), WORKERS, SECONDS, SECONDS, SECONDS, SECONDS),
    min_size=1,
    max_size=3,
    unique_by=lambda visit: visit[0],
)


def open_traces() -> tuple[Tracer, Traces, Writer]:
    tracer = Tracer("http://127.0.0.1:9", "p")
    tracer.offset_ns = 1_700_000_000 * 10**9 + 7
    writer = Writer(tracer, Names("p", (), lambda address: f"replica-{address}"))
    return tracer, Traces(tracer, "p", (), lambda address: f"replica-{address}"), writer


def taken(tracer: Tracer) -> list[Seen]:
    """Spans without their ids and with rounded sums, in an order of their own."""
    found: list[Seen] = []
    while tracer._waiting:
        body, count = tracer.take()
        seen = read(bytes(body))
        assert len(seen) == count
        found += seen
    assert len({span.span_id for span in found}) == len(found)
    return sorted(
        (
            dataclasses.replace(
                span,
                span_id="",
                attributes={
                    key: float(f"{value:.9g}") if key.endswith("total_s") else value
                    for key, value in span.attributes.items()
                },
            )
            for span in found
        ),
        key=lambda span: (span.trace_id, span.name),
    )


@st.composite
def streams(draw: st.DrawFn) -> Trail:
    """An ordinary looping request."""
    trail = Trail(draw(st.binary(min_size=16, max_size=16)), b"p" * 8, draw(SECONDS))
    trail.bindings.append(Binding(trail.begun_s + 1.0, draw(WORKERS), (0.0,) * STAGES))
    few = draw(st.lists(st.lists(SECONDS, min_size=2 * STAGES, max_size=2 * STAGES), min_size=1, max_size=5))
    at_s = trail.begun_s + 2.0
    for number in range(draw(COUNTS)):
        at_s += draw(st.sampled_from((0.0, 0.125, 3.0)))
        trail.steps.append(packed(at_s, few[number % len(few)]))
    return trail


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(streams(), min_size=1, max_size=5, unique_by=lambda trail: trail.trace_id))
def test_looping_requests(trails: list[Trail]) -> None:
    tracer, traces, writer = open_traces()
    for trail in trails:
        traces.end(trail, None)
    assert len(tracer._waiting) == len(trails)
    together = taken(tracer)
    for trail in trails:
        writer.looping(trail)
    assert together == taken(tracer)


def test_arrays_of_steps_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_tables, "MOST_VALUES", 2 * 8 * (1 + 2 * STAGES))
    tracer, traces, writer = open_traces()
    trails = [Trail(bytes((number,)) * 16, b"p" * 8, 1.0) for number in range(5)]
    for trail in trails:
        trail.bindings.append(Binding(1.5, ("a", "b", "c"), (0.0,) * STAGES))
        trail.steps += [packed(2.0 + step, [0.5] * 6) for step in range(6)]
        traces.end(trail, None)
    together = taken(tracer)
    for trail in trails:
        writer.looping(trail)
    assert together == taken(tracer)


def test_a_step_without_times_is_no_ordinary_one_and_counts_all_the_same() -> None:
    tracer, traces, _ = open_traces()
    trail = Trail(b"t" * 16, b"p" * 8, 1.0)
    trail.bindings.append(Binding(1.5, ("a", "b", "c"), (0.0,) * STAGES))
    trail.steps += [packed(2.0, None), packed(3.0, [0.5] * 6), packed(4.0, [0.5] * 6)]
    traces.end(trail, None)
    found = {span.name: span for span in taken(tracer)}
    assert found["decode"].attributes["keystage.steps"] == 2
    assert found["stage 1"].attributes["keystage.steps"] == 2
    assert found["stage 1"].end_s == found["decode"].end_s


@settings(deadline=None)
@given(st.lists(VISITS, min_size=1, max_size=5))
def test_items(requests: list[list[Any]]) -> None:
    tracer, traces, writer = open_traces()
    trails = [Trail(bytes((number,)) * 16, b"p" * 8, 0.0) for number in range(len(requests))]
    for trail, visits in zip(trails, requests, strict=True):
        for stage, workers, queued_s, waited_s, took_s, compute_s in visits:
            sent_s = queued_s + waited_s
            trail.visits.append(
                Visit(stage, stage, queued_s, sent_s, sent_s + took_s, compute_s, workers[stage], -1.0)
            )
        traces.end(trail, None)
    together = taken(tracer)
    for trail in trails:
        for visit in trail.visits:
            writer.visit(trail, visit)
    assert together == taken(tracer)


def test_requests_at_the_face_by_path_status_and_parent() -> None:
    tracer, _, _ = open_traces()
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01".encode()
    for path, status, header in (("/", 200, None), ("/", 503, caller), ("/v1/completions", 499, caller)):
        for _ in range(2):
            entry = Entry(tracer, header, path)
            entry.status = status
            entry.end()
    silent = Entry(tracer, caller[:-2] + b"00", "/")
    silent.end()
    found = taken(tracer)
    told = sorted((s.name, s.attributes["http.response.status_code"], s.parent_id, s.error) for s in found)
    assert told == [
        *[("POST /", 200, "", None)] * 2,
        *[("POST /", 503, "cd" * 8, "status 503")] * 2,
        *[("POST /v1/completions", 499, "cd" * 8, None)] * 2,
    ]
    assert {s.attributes["url.path"] for s in found} == {"/", "/v1/completions"}
    assert {(s.kind, s.attributes["http.request.method"]) for s in found} == {(2, "POST")}


def test_what_cannot_be_written_is_counted_and_the_rest_is_sent() -> None:
    class Broken:
        spans = 3

        def write(self, *_: object) -> None:
            raise ZeroDivisionError

    tracer, traces, _ = open_traces()
    tracer.note(Broken(), ())
    with pytest.raises(ZeroDivisionError):
        tracer.take()
    assert tracer.dropped == 3
    trail = Trail(b"t" * 16, b"p" * 8, 1.0)
    trail.visits.append(Visit(0, 0, 1.0, 2.0, 3.0, 0.5, "a", 0.0))
    traces.end(trail, None)
    assert len(taken(tracer)) == 3

"""Spans read back with OpenTelemetry's own code; the tracer with a collector that takes them or does not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collector import collector, read

from keystage.wire import spans, tracing
from keystage.wire.config import TraceConfig
from keystage.wire.tracing import Tracer, TracesRefused, open_tracer

RESOURCE = spans.resource({"service.name": "s"})
VALUES = st.one_of(
    st.booleans(), st.integers(0, 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=300)
)


def body(*made: bytes) -> bytes:
    return spans.export_request(RESOURCE, "keystage", "1", made)


@pytest.mark.slow
@given(VALUES, st.integers(0, 2**63 - 1), st.text(max_size=200))
def test_what_is_written_is_what_opentelemetry_reads(value: bool | float | str, at: int, why: str) -> None:
    more = spans.attributes({"a": value, "b": "second"})
    made = spans.span(b"t" * 16, b"s" * 8, b"p" * 8, "n", at, at + 5, more, spans.SERVER, why)
    (seen,) = read(body(made))
    assert seen.attributes == {"a": value, "b": "second"}
    assert (seen.service, seen.name, seen.kind, seen.error) == ("s", "n", spans.SERVER, why)
    assert (seen.trace_id, seen.span_id, seen.parent_id) == (
        (b"t" * 16).hex(), (b"s" * 8).hex(), (b"p" * 8).hex()
    )  # fmt: skip
    assert (seen.start_s, seen.end_s) == (at / 1e9, (at + 5) / 1e9)


def test_a_first_span_has_no_parent_and_no_error_is_none_and_time_does_not_run_backwards() -> None:
    first, second = read(body(*(spans.span(b"t" * 16, b"s" * 8, b"", "n", 9, end) for end in (12, 3))))
    assert (first.parent_id, first.error) == ("", None)
    assert second.end_s == second.start_s == 9e-9


def test_long_texts_are_cut() -> None:
    made = spans.span(
        b"t" * 16, b"s" * 8, b"", "n", 1, 2, spans.attribute("a", "x" * 100_000), error="y" * 10**6
    )
    (seen,) = read(body(made))
    assert (len(seen.attributes["a"]), len(seen.error or "")) == (spans.MOST_CHARACTERS,) * 2


@given(st.lists(st.floats(allow_nan=False), min_size=3, max_size=3))
def test_numbers_written_at_once_are_the_same_attributes(values: list[float]) -> None:
    keys = ("a", "bcd", "e" * 200)
    made = spans.span(b"t" * 16, b"s" * 8, b"", "n", 1, 2, spans.Doubles(*keys).written(values))
    assert read(body(made))[0].attributes == dict(zip(keys, values, strict=True))


def test_many_spans_of_odd_sizes_are_one_body() -> None:
    rng = random.Random(1)
    texts = ["x" * rng.randrange(0, 900) for _ in range(500)]
    made = [spans.span(b"t" * 16, b"s" * 8, b"", "n", 1, 2, spans.attribute("a", text)) for text in texts]
    assert [seen.attributes["a"] for seen in read(body(*made))] == texts


# ---------------------------------------------------------------- who is traced


def tracer(**settings: object) -> Tracer:
    return Tracer("http://127.0.0.1:9/v1/traces", "s", **settings)  # type: ignore[arg-type]


def test_a_trace_goes_on_under_its_caller_and_follows_its_flag() -> None:
    for flag, sampler, is_sampled in (
        ("01", "parentbased_always_off", True),
        ("00", "parentbased_always_on", False),
        ("00", "always_on", True),
        ("01", "always_off", False),
    ):
        given_header = f"00-{'ab' * 16}-{'cd' * 8}-{flag}".encode()
        own, under = tracer(sampler=sampler).begin(given_header)
        assert (own.trace_id.hex(), under.hex(), own.is_sampled) == ("ab" * 16, "cd" * 8, is_sampled)
        assert own.span_id.hex() != "cd" * 8


def test_a_part_of_the_traces_begun_here_is_kept() -> None:
    some = tracer(sampler="parentbased_traceidratio", ratio=0.25)
    kept = sum(some.begin(None)[0].is_sampled for _ in range(4000))
    assert 800 < kept < 1200  # six standard deviations are 164
    assert not any(tracer(sampler="traceidratio", ratio=0.0).begin(b"junk")[0].is_sampled for _ in range(100))


def test_ids_do_not_repeat() -> None:
    one, two = tracer(), tracer()
    assert len({each.begin(None)[0].trace_id for each in (one, two) for _ in range(1000)}) == 2000


def test_times_follow_the_wall_clock_where_it_was_set_and_not_where_it_was_read_late() -> None:
    some = tracer()
    before_ns = some.unix_ns(10.0)
    some._follow_wall_clock(some.offset_ns + 3000)
    assert some.unix_ns(10.0) == before_ns
    some._follow_wall_clock(some.offset_ns - 3_600 * 10**9)
    assert some.unix_ns(10.0) == before_ns - 3_600 * 10**9


# ---------------------------------------------------------------- sending


def test_spans_reach_the_collector_and_what_is_left_when_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "EVERY_S", 60.0)
    with collector() as place:
        sending = Tracer(f"{place.url}/v1/traces", "s", {"k": "v"}, {"X-Key": "secret"})
        sending.start()
        for _ in range(3 * tracing.MOST_AT_ONCE):
            sending.add(spans.span(b"t" * 16, sending.new_id(), b"", "n", 1, 2))
        sending.stop()
        assert (len(place.spans), place.bodies) == (3 * tracing.MOST_AT_ONCE, 3)
        assert place.headers["X-Key"] == "secret"
        assert (sending.sent, sending.dropped) == (3 * tracing.MOST_AT_ONCE, 0)


def test_what_comes_while_it_sends_waits_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = tracer()
    posted: list[int] = []

    def post(body: memoryview) -> str:
        posted.append(len(read(bytes(body))))
        sending.add(spans.span(b"t" * 16, sending.new_id(), b"", "n", 1, 2))
        return ""

    monkeypatch.setattr(sending, "_post", post)
    for _ in range(3):
        sending.add(spans.span(b"t" * 16, sending.new_id(), b"", "n", 1, 2))
    sending._send_all()
    sending._send_all()
    assert (posted, sending.sent, sending.take()[1]) == ([3, 1], 4, 1)


def test_what_the_collector_does_not_take_is_dropped_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collector() as place:
        place.status = 503
        sending = Tracer(f"{place.url}/v1/traces", "s")
        for _ in range(3):
            sending.add(spans.span(b"t" * 16, b"s" * 8, b"", "n", 1, 2))
            sending._send()
        sending.start()
        sending.stop()  # closes its connection
    assert (sending.sent, sending.dropped) == (0, 3)
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "503" in said[0]


def test_a_collector_that_is_not_there_costs_spans_and_nothing_else() -> None:
    with collector() as place:
        pass
    sending = Tracer(f"{place.url}/v1/traces", "s", timeout_s=1.0)
    sending.add(b"")
    sending._send()
    assert sending.dropped == 1


def test_a_queue_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING_BYTES", 4 * (tracing.RECORD_BYTES + 300))
    full = tracer()
    for _ in range(8):
        full.add(bytes(300))
    assert full.dropped == 3
    assert full.take()[1] == 5
    full.add(bytes(300))
    assert full.dropped == 3  # there is room again


# ---------------------------------------------------------------- settings


def clean(monkeypatch: pytest.MonkeyPatch, **given_env: str) -> None:
    for field in TraceConfig.model_fields.values():
        monkeypatch.delenv(str(field.validation_alias), raising=False)
    for name, value in given_env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "given_env",
    [
        {},
        {"KEYSTAGE_TRACES": "off", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
        {"KEYSTAGE_TRACES": "on", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
        # Others' settings are none of our business while traces are off.
        {"OTEL_TRACES_SAMPLER": "jaeger_remote", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_SDK_DISABLED": ""},
    ],
)
def test_traces_are_off(monkeypatch: pytest.MonkeyPatch, given_env: dict[str, str]) -> None:
    clean(monkeypatch, **given_env)
    assert open_tracer("s") is None


@pytest.mark.parametrize(
    ("given_env", "url"),
    [
        ({"KEYSTAGE_TRACES": "on"}, "http://127.0.0.1:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318/"}, "https://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/there"}, "http://c/there"),
    ],
)
def test_traces_are_on(monkeypatch: pytest.MonkeyPatch, given_env: dict[str, str], url: str) -> None:
    clean(monkeypatch, **given_env)
    config = TraceConfig()
    assert config.is_on
    assert config.url == url


def test_pairs_are_read_as_opentelemetry_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(
        monkeypatch,
        OTEL_EXPORTER_OTLP_HEADERS="api-key=a%20b, x=1,broken",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="x=2",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    config = TraceConfig()
    assert config.headers == {"api-key": "a b", "x": "2"}
    assert config.resource == {"deployment.environment.name": "test"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "many", "many"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4318", "http"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:99999", "ort"),
    ],
)
def test_a_setting_without_sense_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    clean(monkeypatch, KEYSTAGE_TRACES="on", OTEL_EXPORTER_OTLP_HEADERS="key=secret", **{name: value})
    with pytest.raises(TracesRefused, match=said) as refused:
        open_tracer("s")
    assert "secret" not in str(refused.value)

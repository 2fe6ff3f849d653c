"""A collector of traces: takes OTLP over HTTP and reads it with OpenTelemetry's own generated code."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One span as the collector has it; times in Unix seconds."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    error: str | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass
class Collector:
    """What came so far.

    Attributes:
        url: base address, as `OTEL_EXPORTER_OTLP_ENDPOINT` takes it.
        status: what it answers.
        bodies: posts so far.
    """

    url: str
    status: int = 200
    bodies: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    spans: list[Seen] = dataclasses.field(default_factory=list)

    def wait(self, holds: Callable[[list[Seen]], bool], what: str) -> list[Seen]:
        """The spans, once the condition holds."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            spans = list(self.spans)
            if holds(spans):
                return spans
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {PATIENCE_S:g} s; there are {[s.name for s in self.spans]}")


def read(body: bytes) -> list[Seen]:
    """The spans in one body."""
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    found = []
    for of in request.resource_spans:
        service = _values(of.resource.attributes)["service.name"]
        for scope in of.scope_spans:
            assert scope.scope.name == "keystage"
            found += [_seen(service, span) for span in scope.spans]
    return found


@contextlib.contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """Serves one on this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.bodies += 1
            seen.headers = dict(self.headers.items())
            if seen.status < 300:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                seen.spans += read(body)
            self.send_response(seen.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    seen = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _seen(service: str, span: Any) -> Seen:
    return Seen(
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        error=span.status.message if span.status.code == 2 else None,
    )

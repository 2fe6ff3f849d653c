"""Traces of requests: who is traced, and how finished spans get to a collector (OTLP over HTTP).

Before it: `wire.config.TraceConfig` says whether, and where to. After it: an OpenTelemetry collector, Jaeger
or Tempo, `POST /v1/traces`. Off by default: `open_tracer` returns None then, and whoever has None looks no
further. A part notes times as it goes, and when a request ends makes its spans or leaves a record of it; a
thread makes spans of the records, many at once, and sends all. It must not hold up a request: what the
collector does not take in time is dropped and counted.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from keystage.wire import spans
from keystage.wire.config import TraceConfig
from keystage.wire.errors import WireError
from keystage.wire.span_body import Body
from keystage.wire.traceparent import TraceParent, parse

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Between two bodies to the collector; spans are seen so soon after their request."""
MOST_WAITING_BYTES = 32 << 20
"""Of records and spans that wait for the collector."""
RECORD_BYTES = 500
"""What a record takes, beside bytes of its own: a tuple, its numbers and ids."""
MOST_AT_ONCE = 4096
"""Spans in one body: about 1.5 MB; collectors take 4 MB and more."""
HEAD_BYTES = 256
"""Room for what stands before the spans of a body, beside the resource: scope, version, lengths."""
LEAST_SET_NS = 1_000_000
"""By which the wall clock must have been set for times to follow it."""
COMPLAINT_S = 60.0
"""Between two lines of the log about a collector that takes nothing."""
STOP_S = 2.0
"""For what is left when the process ends."""
SCOPE = "keystage"
_BITS = 64


class Maker(Protocol):
    """Makes spans of records of one kind."""

    @property
    def spans(self) -> int:
        """How many of each record."""

    def write(self, records: Sequence[Any], body: Body, tracer: Tracer) -> None:
        """Appends the spans of some records; called by the thread that sends."""


class _Made:
    """Spans that are made already."""

    spans = 1

    def write(self, records: Sequence[bytes], body: Body, tracer: Tracer) -> None:
        """See `Maker`."""
        body.add(b"".join(records))


_MADE = _Made()


class Tracer:
    """One process's traces.

    Args:
        url: where bodies are posted, `http(s)://host[:port]/path`.
        service: name of the service in the traces.
        resource: what else is said of the process.
        headers: sent along, for collectors that want a key.
        sampler: as OpenTelemetry names them, see `TraceConfig.sampler`.
        ratio: of those samplers that take a part.
        timeout_s: for one body.

    Attributes:
        sent: spans that the collector took.
        offset_ns: what a monotonic time lacks to Unix nanoseconds.
    """

    def __init__(
        self,
        url: str,
        service: str,
        resource: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        sampler: str = "parentbased_always_on",
        ratio: float = 1.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._url = urlsplit(url)
        told: dict[str, spans.Value] = {
            "service.name": service,
            "process.pid": os.getpid(),
            **(resource or {}),
        }
        self._resource = spans.resource(told)
        self._headers = {"Content-Type": "application/x-protobuf", **(headers or {})}
        self._is_following = sampler.startswith("parentbased_")
        kind = sampler.removeprefix("parentbased_")
        part = {"always_on": 1.0, "always_off": 0.0}.get(kind, ratio)
        self._below = round(part * (1 << _BITS))
        self._timeout_s = timeout_s
        self._random, self._random_sent = (random.Random(os.urandom(16)) for _ in range(2))
        self._body = Body(len(self._resource) + HEAD_BYTES)
        self._waiting: deque[tuple[Maker, Any, int]] = deque()
        # Each is counted by one thread only: what comes by the parts', what goes by the one that sends.
        self._come_bytes = self._gone_bytes = 0
        self._without_room = self._not_taken = 0
        self._connection: http.client.HTTPConnection | None = None
        self._complained_s = -COMPLAINT_S
        self._wake = threading.Event()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self.offset_ns = time.time_ns() - time.monotonic_ns()
        self.sent = 0

    @property
    def dropped(self) -> int:
        """Spans that the collector did not take, or for which there was no room."""
        return self._without_room + self._not_taken

    # ------------------------------------------------------------ who

    def begin(self, header: bytes | None) -> tuple[TraceParent, bytes]:
        """A new span of a request that comes in.

        Args:
            header: the request's `traceparent`, None without.

        Returns:
            The span, by which others know it, and the id of the one it is under, empty for none.
        """
        parent = parse(header)
        if parent is None:
            drawn = self._random.randbytes(24)
            trace_id, own = drawn[:16], drawn[16:]
        else:
            trace_id, own = parent.trace_id, self.new_id()
        if parent is not None and self._is_following:
            is_sampled = parent.is_sampled
        else:
            is_sampled = int.from_bytes(trace_id[8:], "big") < self._below
        return TraceParent(trace_id, own, is_sampled), parent.span_id if parent is not None else b""

    def new_id(self) -> bytes:
        """Id of one more span."""
        return self._random.randbytes(8)

    def new_ids(self, count: int) -> bytes:
        """Ids of so many more spans, joined; for `Maker`s: it draws from numbers of the thread's own."""
        return self._random_sent.randbytes(8 * count)

    def unix_ns(self, at_s: float) -> int:
        """A time of this process's monotonic clock in Unix nanoseconds."""
        return int(at_s * 1e9) + self.offset_ns

    # ------------------------------------------------------------ what

    def add(self, span: bytes) -> None:
        """A finished span (`wire.spans.span`); without room it is dropped."""
        self.note(_MADE, span, len(span))

    def note(self, maker: Maker, record: object, own_bytes: int = 0) -> None:
        """A record of which spans are made when they are sent; without room they are dropped.

        Args:
            maker: makes them; the same for all records of a kind.
            record: what it knows them by.
            own_bytes: bytes of the record beyond `RECORD_BYTES`.
        """
        if self._come_bytes - self._gone_bytes > MOST_WAITING_BYTES:
            self._without_room += maker.spans
            return
        own_bytes += RECORD_BYTES
        self._come_bytes += own_bytes
        self._waiting.append((maker, record, own_bytes))

    # ------------------------------------------------------------ where to

    def start(self) -> None:
        """Begins to send."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sends what is left, for `STOP_S` at most."""
        self._is_ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._is_ending:
            self._wake.wait(EVERY_S)
            self._follow_wall_clock(time.time_ns() - time.monotonic_ns())
            self._send_all()
        self._send_all()
        if self._connection is not None:
            self._connection.close()

    def _follow_wall_clock(self, offset_ns: int) -> None:
        """The clock may have been set. A small difference is time between two readings, and no reason."""
        if abs(offset_ns - self.offset_ns) >= LEAST_SET_NS:
            self.offset_ns = offset_ns

    def _send_all(self) -> None:
        """Sends what waits now; what comes meanwhile waits, or bodies would be many and small."""
        until_bytes = self._come_bytes
        while self._gone_bytes < until_bytes:
            try:
                self._send()
            except Exception:  # a bug: later spans are to be sent all the same
                log.exception("spans were not sent")

    def take(self) -> tuple[memoryview, int]:
        """A body of what waits, to be used before the next one, and how many spans it has.

        They are `MOST_AT_ONCE` at most, or just above it.
        """
        by_maker: dict[Maker, list[Any]] = {}
        count = 0
        while self._waiting and count < MOST_AT_ONCE:
            maker, record, own_bytes = self._waiting.popleft()
            by_maker.setdefault(maker, []).append(record)
            count += maker.spans
            self._gone_bytes += own_bytes
        try:
            self._body.clear()
            for maker, records in by_maker.items():
                maker.write(records, self._body, self)
            head = spans.export_head(self._resource, SCOPE, _version(), len(self._body))
            return self._body.whole(head), count
        except Exception:  # a bug: the spans are lost, and counted so
            self._not_taken += count
            raise

    def _send(self) -> None:
        body, count = self.take()
        why = self._post(body)
        if why:
            self._not_taken += count
            self._complain(f"{count} spans dropped: {why}")
        else:
            self.sent += count

    def _post(self, body: memoryview) -> str:
        """Why the collector did not take it, empty where it did; a kept connection may have ended by then."""
        where = self._url.path or "/"
        if self._url.query:
            where += f"?{self._url.query}"
        why = ""
        for _ in range(2):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.request("POST", where, body, self._headers)
                answer = self._connection.getresponse()
                said = answer.read()
                if answer.status < 300:
                    return ""
                return f"{self._url.netloc} answered {answer.status} {said[:200]!r}"
            except (OSError, http.client.HTTPException) as error:
                why = f"{self._url.netloc}: {error or type(error).__name__}"
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
        return why

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname is not None, "checked by the settings"
        return kind(self._url.hostname, self._url.port, timeout=self._timeout_s)

    def _complain(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAINT_S:
            self._complained_s = now_s
            log.warning("traces: %s", text)


class TracesRefused(WireError):
    """Traces are asked for in a way that cannot be done."""


def open_tracer(service: str, resource: Mapping[str, str] | None = None) -> Tracer | None:
    """The tracer that the environment asks for, started; None: requests are not traced.

    Args:
        service: name of the service where `OTEL_SERVICE_NAME` gives none.
        resource: attributes of the process, beside those of `OTEL_RESOURCE_ATTRIBUTES`.

    Raises:
        TracesRefused: a variable has no sense; names it, and never what it holds of headers.
    """
    try:
        config = TraceConfig()
    except ValidationError as error:
        raise TracesRefused("; ".join(_words(fault) for fault in error.errors(include_url=False))) from None
    if not config.is_on:
        return None
    tracer = Tracer(
        config.url,
        config.service_name or service,
        {
            "service.namespace": "keystage",
            "service.version": _version(),
            **(resource or {}),
            **config.resource,
        },
        config.headers,
        config.sampler,
        config.ratio,
        config.timeout_s,
    )
    tracer.start()
    log.info("traces go to %s", urlsplit(config.url).hostname)
    return tracer


def _words(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    said = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


@cache
def _version() -> str:
    try:
        return version("keystage")
    except PackageNotFoundError:
        return "0"

"""The gateway's part of a request's trace: one span an invocation, handed on to the replica.

Before it: `gateway.proxy` begins and ends it. After it: `wire.tracing` sends it, and the replica, a router
for example, makes its spans under it: its `traceparent` takes the place of the caller's. Without traces the
caller's passes as it is, and WebSockets and asynchronous calls always have the caller's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from keystage.wire import spans
from keystage.wire.traceparent import HEADER, written
from keystage.wire.tracing import Tracer

Pair = tuple[bytes, bytes]
RESPONSE = b"traceresponse"
"""W3C Trace Context level 2: which trace an answer belongs to."""
WAITED_S = 0.001
"""A wait for a replica that is shorter makes no span."""


class Invocation:
    """The span of one invocation.

    Args:
        tracer: sends it.
        pairs: the caller's headers, lower-case names.
        method: HTTP method.

    Attributes:
        trace_id: of its trace, empty where that is not recorded.
        header: by which the replica knows it.
    """

    __slots__ = (
        "_begun_s",
        "_method",
        "_parent",
        "_replica",
        "_tracer",
        "_under",
        "_until_s",
        "header",
        "trace_id",
    )

    def __init__(self, tracer: Tracer, pairs: Iterable[Pair], method: str) -> None:
        given = next((value for name, value in pairs if name == HEADER), None)
        self._parent, self._under = tracer.begin(given)
        self._tracer = tracer
        self._method = method if method in _METHODS else "_OTHER"
        self._begun_s = time.monotonic()
        self._until_s = 0.0
        self._replica = ""
        self.trace_id = self._parent.trace_id.hex() if self._parent.is_sampled else ""
        self.header = written(self._parent)

    def acquired(self, replica: str) -> None:
        """A replica is found, the first or another one."""
        self._until_s = time.monotonic()
        self._replica = replica

    def end(self, function: str, status: int) -> None:
        """The answer has ended, or nobody waits for it any more."""
        if not self.trace_id:
            return
        tracer, parent = self._tracer, self._parent
        begun_ns, now_ns = tracer.unix_ns(self._begun_s), tracer.unix_ns(time.monotonic())
        more = spans.attributes(
            {
                "http.request.method": self._method,
                "http.response.status_code": status,
                "faas.invoked_name": function,
                "keystage.replica": self._replica,
            }
        )
        if self._until_s - self._begun_s >= WAITED_S:
            tracer.add(
                spans.span(
                    parent.trace_id,
                    tracer.new_id(),
                    parent.span_id,
                    "wait for a replica",
                    begun_ns,
                    tracer.unix_ns(self._until_s),
                )
            )
        error = f"status {status}" if status >= 500 else None
        tracer.add(
            spans.span(
                parent.trace_id,
                parent.span_id,
                self._under,
                f"{self._method} /function/{{name}}",
                begun_ns,
                now_ns,
                more,
                spans.SERVER,
                error,
            )
        )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def handed_on(headers: list[Pair], invocation: Invocation) -> list[Pair]:
    """The replica's headers, with the invocation in the place of its caller."""
    kept = [pair for pair in headers if pair[0] != HEADER]
    kept.append((HEADER, invocation.header))
    return kept

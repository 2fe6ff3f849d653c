"""The header `traceparent`, by which a request's trace is known to everybody on its way. Pure.

W3C Trace Context, section 3.2: `00-<trace id: 32 hex>-<parent id: 16 hex>-<flags: 2 hex>`, lower case.
What is none of that is no trace context, and the request begins a trace of its own (section 3.3).
`tracestate` passes unread. Before it: HTTP headers. After it: `wire.tracing`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = b"traceparent"
SAMPLED = 1
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


class TraceParent(NamedTuple):
    """A span of somebody's, under which others begin.

    Attributes:
        trace_id: 16 bytes, not all zero.
        span_id: 8 bytes, not all zero.
        is_sampled: whether the one before records the trace.
    """

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


def parse(value: bytes | None) -> TraceParent | None:
    """Reads the header's value; None for anything that names no trace.

    Later versions may have more behind the flags, version 00 has not; ff is none.
    """
    found = _FORM.fullmatch(value.strip()) if value is not None and len(value) <= 512 else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more):
        return None
    trace_id, span_id = bytes.fromhex(trace.decode()), bytes.fromhex(span.decode())
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def written(parent: TraceParent) -> bytes:
    """The header's value for a span."""
    return f"00-{parent.trace_id.hex()}-{parent.span_id.hex()}-{int(parent.is_sampled):02x}".encode()

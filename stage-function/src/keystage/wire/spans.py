"""Spans as OTLP's protobuf has them (`opentelemetry/proto/trace/v1/trace.proto`), written here. Pure.

Before it: `router.traces` and `gateway.traces` know what took how long. After it: `wire.tracing` sends them.
Why no SDK: a request through eight stages makes a dozen spans, and the SDK's objects and encoder take
several times what the router may spend on them (docs/decisions/024-spans-without-an-sdk.md). Only fields that
are used are written; the tests read them back with OpenTelemetry's own generated code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

Value = str | bool | int | float
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Kinds of spans."""
MOST_CHARACTERS = 1024
"""Longest text of an attribute, a refusal's words for example."""
_TIMES = struct.Struct("<BQBQ")
_DOUBLE = struct.Struct("<3sd")
_SHORT = [bytes((value,)) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SHORT[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(tag: int, data: bytes) -> bytes:
    return b"%c%b%b" % (tag, _varint(len(data)), data)


@cache
def _key(key: str) -> bytes:
    """Keys are a fixed few, by what the code writes."""
    return _field(0x0A, key.encode())


@cache
def _name(name: str) -> bytes:
    """Names are as few as stages, modules and paths of a pipeline."""
    return _field(0x2A, name.encode())


def _value(value: Value) -> bytes:
    if type(value) is float:
        return _DOUBLE.pack(b"\x12\x09\x21", value)
    if isinstance(value, bool):
        return b"\x12\x02\x10\x01" if value else b"\x12\x02\x10\x00"
    if isinstance(value, int):
        return _field(0x12, b"\x18" + _varint(value & 0xFFFFFFFFFFFFFFFF))
    if isinstance(value, float):
        return _DOUBLE.pack(b"\x12\x09\x21", value)
    return _field(0x12, _field(0x0A, value[:MOST_CHARACTERS].encode("utf-8", "replace")))


def attribute(key: str, value: Value) -> bytes:
    """One attribute of a span; several are joined.

    Args:
        key: one of a fixed few: it is kept.
        value: text beyond `MOST_CHARACTERS` is cut.
    """
    return _field(0x4A, _key(key) + _value(value))


class Doubles:
    """Attributes that are numbers and always the same ones, written at once.

    Args:
        keys: their names, in the order of the values.

    Attributes:
        offsets: bytes before each value in what is written.
    """

    def __init__(self, *keys: str) -> None:
        self._parts: list[bytes | float] = []
        self.offsets: list[int] = []
        form = "<"
        for key in keys:
            whole = _key(key) + _value(0.0)
            head = (b"\x4a" + _varint(len(whole)) + whole)[:-8]
            self._parts += (head, 0.0)
            form += f"{len(head)}sd"
            self.offsets.append(struct.calcsize(form) - 8)
        self._struct = struct.Struct(form)

    def written(self, values: Sequence[float]) -> bytes:
        """The attributes with these values, as many as there are keys."""
        parts = self._parts.copy()
        parts[1::2] = values
        return self._struct.pack(*parts)


def attributes(values: Mapping[str, Value]) -> bytes:
    """Several attributes of a span."""
    return b"".join([attribute(key, value) for key, value in values.items()])


def span(
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes,
    name: str,
    start_ns: int,
    end_ns: int,
    more: bytes = b"",
    kind: int = INTERNAL,
    error: str | None = None,
) -> bytes:
    """One span, as an element of a `ScopeSpans`.

    Args:
        trace_id: 16 bytes.
        span_id: 8 bytes.
        parent_id: 8 bytes, empty for the first span of a trace.
        name: one of few: it is kept.
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds, not before `start_ns`.
        more: attributes.
        kind: `INTERNAL`, `SERVER` or `CLIENT`.
        error: why it failed, None: it did not.
    """
    parent = b"\x22\x08" + parent_id if parent_id else b""
    status = b""
    if error is not None:
        said = error[:MOST_CHARACTERS].encode("utf-8", "replace")
        status = _field(0x7A, _field(0x12, said) + b"\x18\x02")
    body = b"\x0a\x10%b\x12\x08%b%b%b\x30%c%b%b%b" % (
        trace_id, span_id, parent, _name(name), kind,
        _TIMES.pack(0x39, start_ns, 0x41, max(start_ns, end_ns)), more, status,
    )  # fmt: skip
    return _field(0x12, body)


def resource(values: Mapping[str, Value]) -> bytes:
    """What all spans of a process share, as the first field of a `ResourceSpans`."""
    pairs = b"".join(_field(0x0A, _key(key) + _value(value)) for key, value in values.items())
    return _field(0x0A, pairs)


def export_request(of: bytes, scope: str, version: str, spans: Iterable[bytes]) -> bytes:
    """The body of `POST /v1/traces`.

    Args:
        of: see `resource`.
        scope: name of what made the spans.
        version: its version.
        spans: see `span`.
    """
    joined = b"".join(spans)
    return export_head(of, scope, version, len(joined)) + joined


def export_head(of: bytes, scope: str, version: str, count: int) -> bytes:
    """What stands before `count` bytes of spans in a body; see `export_request`."""
    maker = _field(0x0A, _field(0x0A, scope.encode()) + _field(0x12, version.encode()))
    inner = of + b"\x12" + _varint(len(maker) + count) + maker
    return b"\x0a" + _varint(len(inner) + count) + inner

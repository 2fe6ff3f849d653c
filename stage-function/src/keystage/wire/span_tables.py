"""Spans that differ in ids, times and numbers only, written many at once. Pure.

Before it: `router.trace_tables` has the records of a second as columns. After it: `wire.tracing` posts what
is written. A table is one span as `wire.spans` writes it, with places left empty: in OTLP's protobuf ids are
bytes of fixed length, times `fixed64` and numbers `double`, so all spans of a table have the same length, and
each place the same offset. The span is copied a row each, and every place is filled for all rows by one
assignment. The bytes are those that `spans.span` would have written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keystage.wire import spans
from keystage.wire.span_body import Body

TRACE_ID, SPAN_ID = np.dtype("V16"), np.dtype("V8")


class Count:
    """An attribute that is a number from 0 on, in a fixed number of bytes.

    Args:
        key: its name.
        width: bytes of the number (`width_of`).
    """

    def __init__(self, key: str, width: int) -> None:
        self.width = width
        self.blank = spans.attribute(key, 1 << 7 * (width - 1))


def width_of(count: int) -> int:
    """Bytes of a count's varint: seven bits each."""
    return max(1, (count.bit_length() + 6) // 7)


class SpanTable:
    """Spans of one kind.

    Args:
        name: of all.
        more: attributes: bytes are the same in all, `Doubles` and `Count`s have their values in each.
        kind: see `spans.span`.
        error: see `spans.span`.
        is_first: whether they have no parent.
    """

    def __init__(
        self,
        name: str,
        more: Sequence[bytes | spans.Doubles | Count],
        kind: int = spans.INTERNAL,
        error: str | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        parent = b"" if is_first else bytes(8)
        head = spans.span(bytes(16), bytes(8), parent, name, 0, 0, b"", kind)
        filled = [_blank(part) for part in more]
        whole = spans.span(bytes(16), bytes(8), parent, name, 0, 0, b"".join(filled), kind, error)
        at = _body_at(whole)
        end = at + len(head) - _body_at(head)
        fields: dict[str, tuple[object, int]] = {
            "trace": (TRACE_ID, at + 2),
            "own": (SPAN_ID, at + 20),
            "start": ("<i8", end - 17),
            "end": ("<i8", end - 8),
        }
        if not is_first:
            fields["parent"] = (SPAN_ID, at + 30)
        self._places: list[list[str] | int] = []
        for part, written in zip(more, filled, strict=True):
            if isinstance(part, spans.Doubles):
                names = [f"{end + offset}" for offset in part.offsets]
                fields |= {place: ("<f8", int(place)) for place in names}
                self._places.append(names)
            elif isinstance(part, Count):
                self._places.append(part.width)
                fields[f"count {len(self._places) - 1}"] = (
                    ("u1", (part.width,)),
                    end + len(written) - part.width,
                )
            end += len(written)
        self._is_first = is_first
        self._blank = np.frombuffer(whole, np.uint8)
        self._row = np.dtype(
            {
                "names": list(fields),
                "formats": [form for form, _ in fields.values()],
                "offsets": [offset for _, offset in fields.values()],
                "itemsize": len(whole),
            }
        )

    def write(
        self,
        body: Body,
        trace_ids: NDArray[np.void],
        span_ids: NDArray[np.void],
        parent_ids: NDArray[np.void] | None,
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        *values: NDArray[np.float64] | NDArray[np.int64],
    ) -> None:
        """Writes N spans, elements of a `ScopeSpans`.

        Args:
            body: they are appended to it.
            trace_ids: (N,) of `TRACE_ID`.
            span_ids: (N,) of `SPAN_ID`.
            parent_ids: (N,) of `SPAN_ID`, None for spans without a parent.
            start_ns: (N,) Unix nanoseconds.
            end_ns: (N,) the same; one before its start counts as it.
            values: in the order of `more`, (N, D) for D `Doubles`, (N,) for a `Count`.
        """
        shape = len(trace_ids), len(self._blank)
        written = np.frombuffer(body.take(shape[0] * shape[1]), np.uint8).reshape(shape)
        written[:] = self._blank
        rows = written.view(self._row)[:, 0]
        rows["trace"], rows["own"] = trace_ids, span_ids
        if not self._is_first:
            rows["parent"] = parent_ids
        rows["start"], rows["end"] = start_ns, np.maximum(start_ns, end_ns)
        for number, (place, value) in enumerate(zip(self._places, values, strict=True)):
            if isinstance(place, int):
                rows[f"count {number}"] = _varints(value, place)
            else:
                for k, name in enumerate(place):
                    rows[name] = value[:, k]


def ids(of: Sequence[bytes], form: np.dtype[np.void]) -> NDArray[np.void]:
    """Ids as a column."""
    return np.frombuffer(b"".join(of), form)


def _blank(part: bytes | spans.Doubles | Count) -> bytes:
    if isinstance(part, spans.Doubles):
        return part.written([0.0] * len(part.offsets))
    return part.blank if isinstance(part, Count) else part


def _body_at(span: bytes) -> int:
    """Where a span's fields begin: behind its tag and its length, a varint."""
    at = 2
    while span[at - 1] & 0x80:
        at += 1
    return at


def _varints(counts: NDArray[np.float64] | NDArray[np.int64], width: int) -> NDArray[np.int64]:
    shifts = 7 * np.arange(width)
    parts = counts.astype(np.int64)[:, None] >> shifts & 0x7F
    parts[:, :-1] |= 0x80
    return parts

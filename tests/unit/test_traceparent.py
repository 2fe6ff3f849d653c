"""`traceparent` as W3C Trace Context has it: what is read, what is none, what is written."""

from __future__ import annotations

import pytest

from keystage.wire.traceparent import TraceParent, parse, written

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_header_names_a_span(flags: str, is_sampled: bool) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert found == TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), is_sampled)


def test_a_later_version_may_have_more() -> None:
    assert parse(f"cc-{TRACE}-{SPAN}-01-what-comes".encode()) == parse(f"00-{TRACE}-{SPAN}-01".encode())


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"00",
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"00-{TRACE}-{SPAN}-01-more".encode(),
        f"00-{TRACE.upper()}-{SPAN}-01".encode(),
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"00-{TRACE[:-1]}-{SPAN}-01".encode(),
        f"00-{TRACE}-{SPAN}-0".encode(),
        b"\xff" * 55,
        f"cc-{TRACE}-{SPAN}-01-{'x' * 5000}".encode(),
    ],
)
def test_anything_else_is_no_trace_context(value: bytes | None) -> None:
    assert parse(value) is None


def test_what_is_written_is_read() -> None:
    for is_sampled in (True, False):
        parent = TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), is_sampled)
        assert parse(written(parent)) == parent

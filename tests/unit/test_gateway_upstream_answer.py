"""Where an answer from a replica ends, whatever pieces it comes in, and what is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keystage.gateway.upstream import request_head
from keystage.gateway.upstream_answer import MAX_HEAD_BYTES, Answer, UpstreamBroken, UpstreamError


def pieces(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[k : k + 1] for k in range(len(data))]
    for cut in range(1, len(data)):
        yield [data[:cut], data[cut:]]


def read(answer: Answer, parts: list[bytes], *, is_head: bool = False) -> bytes:
    answer.begin(is_head=is_head)
    body = b""
    for part in parts:
        answer.feed(part)
        body += answer.take()
    return body


OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: %d\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"
HINTS = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
ENDS = [
    # answer, to HEAD, body, complete without an end of the connection, another may follow
    (LENGTH % 3 + b"abc", False, b"abc", True, True),
    (LENGTH % 0, False, b"", True, True),
    (CHUNKED + b"\r\n1;x=y\r\na\r\n2\r\nbc\r\n0\r\nX-T: 1\r\n\r\n", False, b"abc", True, True),
    (CHUNKED + b"Connection: close\r\n\r\n1\r\na\r\n0\r\n\r\n", False, b"a", True, False),
    (OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc", False, b"abc", True, False),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", False, b"abc", True, False),
    (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na", False, b"a", True, True),
    (HINTS + LENGTH % 1 + b"a", False, b"a", True, True),
    (b"HTTP/1.1 204 No Content\r\n\r\n", False, b"", True, True),
    (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", False, b"", True, True),
    (LENGTH % 5, True, b"", True, True),
    (CHUNKED + b"\r\n", True, b"", True, True),
    (OK + b"\r\nabc", False, b"abc", False, False),
    (OK + b"Transfer-Encoding: gzip\r\n\r\nabc", False, b"abc", False, False),
    (b"HTTP/1.0 200 OK\r\n\r\nabc", False, b"abc", False, False),
]


@pytest.mark.parametrize(("data", "is_head", "body", "complete", "keeps"), ENDS)
def test_an_answer_ends_where_it_ends_in_whatever_pieces(
    data: bytes, is_head: bool, body: bytes, complete: bool, keeps: bool
) -> None:
    for parts in pieces(data):
        answer = Answer()
        assert read(answer, parts, is_head=is_head) == body, parts
        assert answer.status in (200, 204, 304)
        assert (answer.is_complete, answer.keep_alive) == (complete, keeps)
        names = {name.lower() for name, _ in answer.headers}
        assert not names & {b"x-t", b"link"}
        if keeps:
            assert read(answer, parts, is_head=is_head) == body
            assert answer.is_complete
        answer.end()
        assert answer.is_complete


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 4\r\n\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n",
        OK + b"Connection: close\r\nContent-Length: 4\r\n\r\nabc",
        OK + b"Content-Len",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"",
    ],
)
def test_an_end_of_the_connection_does_not_complete_what_says_its_length(data: bytes) -> None:
    for parts in pieces(data):
        answer = Answer()
        read(answer, parts)
        answer.end()
        assert not answer.is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"HTTQ/1.1 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 700 High\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"X: a\r\n folded\r\n\r\n",
        OK + b"X: a\nY: b\r\n\r\n",
        OK + b"X: a\x00b\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    for parts in pieces(data):
        answer = Answer()
        with pytest.raises(UpstreamBroken, match="no HTTP answer"):
            read(answer, parts)
        assert not answer.is_complete
        assert not answer.keep_alive


@pytest.mark.parametrize(
    "data",
    [
        OK + b"".join(b"X-%d: yyyyyyyyyy\r\n" % k for k in range(12000)),
        OK + b"X: " + b"y" * 3 * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 " + b"y" * 3 * MAX_HEAD_BYTES,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 8000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 3 * MAX_HEAD_BYTES,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: yyyyyyyyyy\r\n" * 12000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"y" * 3 * MAX_HEAD_BYTES,
    ],
)
def test_heads_and_trailers_have_a_bound(data: bytes) -> None:
    for size in (1, 1000, MAX_HEAD_BYTES):
        answer = Answer()
        with pytest.raises(UpstreamBroken, match="more than 65536 bytes of headers"):
            read(answer, [data[k : k + size] for k in range(0, len(data), size)])


@pytest.mark.parametrize(
    ("first", "more", "is_head"),
    [
        (OK + b"Content-Length: 1\r\n\r\na", OK + b"Content-Length: 0\r\n\r\n", False),
        (OK + b"Content-Length: 1\r\n\r\na", b"b", False),
        (OK + b"Content-Length: 1\r\n\r\n", b"a", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1\r\n\r\n", b"a", False),
    ],
)
def test_what_follows_an_answer_does_not_change_it_but_ends_the_connection(
    first: bytes, more: bytes, is_head: bool
) -> None:
    for parts in ([first + more], [first, more]):
        answer = Answer()
        body = read(answer, parts, is_head=is_head)
        assert (body, answer.is_complete, answer.keep_alive) == (
            b"" if b"304" in first or is_head else b"a",
            True,
            False,
        )
        assert answer.headers[0][0] == b"Content-Length"


def test_a_request_says_how_long_its_body_is() -> None:
    pairs = [(b"content-length", b"7"), (b"x-a", b"1")]
    start = b" /x?y HTTP/1.1\r\nhost: h:1\r\nx-a: 1\r\n"
    assert request_head("POST", b"/x?y", "h:1", pairs, 3) == b"POST" + start + b"content-length: 3\r\n\r\n"
    assert request_head("POST", b"/x?y", "h:1", pairs, 0) == b"POST" + start + b"content-length: 0\r\n\r\n"
    assert request_head("GET", b"/x?y", "h:1", pairs, 0) == b"GET" + start + b"\r\n"
    assert (
        request_head("PUT", b"/x?y", "h:1", pairs, None)
        == b"PUT" + start + b"transfer-encoding: chunked\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("target", "header"),
    [(b"/", b"a\r\nx: b"), (b"/", b"a\nb"), (b"/", b"a\rb"), (b"/ HTTP/1.1\r\nx: y", b""), (b"/a b", b"")],
)
def test_no_line_can_be_smuggled_into_a_request(target: bytes, header: bytes) -> None:
    with pytest.raises(UpstreamError, match="line break"):
        request_head("GET", target, "h:1", [(b"x-a", header)], 0)

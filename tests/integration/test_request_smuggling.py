"""Requests that two servers could read differently: one meaning or a refusal, at router, worker and gateway.

What the gateway passes on is written anew, so its function sees one request for one request, with one length.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop
from support.scripted_upstream import Upstream, head, proxy_to

from keystage.gateway.app import Gateway
from keystage.gateway.server import client_protocol
from keystage.wire.endpoints import listen
from keystage.wire.http_protocol import PassingProtocol

POST = b"POST /function/f/p HTTP/1.1\r\nHost: h\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
EVIL = b"GET /function/f/evil HTTP/1.1\r\nHost: h\r\n\r\n"
BODY = b"\r\n\r\nab"

REFUSED = {
    "a length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + EVIL,
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + EVIL,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3" + BODY + b"c",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2" + BODY,
    "a list of lengths": POST + b"Content-Length: 2, 2" + BODY,
    "a signed length": POST + b"Content-Length: +2" + BODY,
    "a negative length": POST + b"Content-Length: -2" + BODY,
    "a hexadecimal length": POST + b"Content-Length: 0x2" + BODY,
    "a length beyond all bounds": POST + b"Content-Length: 99999999999999999999999" + BODY,
    "an empty length": POST + b"Content-Length: " + BODY,
    "a space before the colon": POST + b"Content-Length : 2" + BODY,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "no coding": POST + b"Transfer-Encoding: identity" + BODY,
    "chunked not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "another coding within": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "chunked twice": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + EVIL,
    "a vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + EVIL,
    "chunks in 1.0": b"POST /function/f HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "a folded field": POST + b"X: a\r\n b\r\nContent-Length: 2" + BODY,
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + EVIL,
    "bare line feeds": b"POST /function/f HTTP/1.1\nHost: h\nContent-Length: 2\n\nab",
    "one bare line feed": POST + b"X: a\nContent-Length: 2" + BODY,
    "a bare carriage return": POST + b"X: a\rContent-Length: 2\r\n\r\n",
    "a NUL in a value": POST + b"X: a\0b\r\nContent-Length: 2" + BODY,
    "a NUL in a name": POST + b"X\0: a\r\nContent-Length: 2" + BODY,
    "a control character": POST + b"X: a\x01b\r\nContent-Length: 2" + BODY,
    "a line feed after an extension": CHUNKED + b"2;x\nab\r\n0\r\n\r\n",
    "chunks with line feeds": CHUNKED + b"2\nab\n0\n\n",
    "a chunk beyond all bounds": CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\nab\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-2\r\nab\r\n0\r\n\r\n",
    "a chunk of 0x2": CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n",
    "a space after a chunk's size": CHUNKED + b"2 \r\nab\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "a length after the chunks": CHUNKED + b"2\r\nab\r\n0\r\nContent-Length: 9\r\n\r\n",
    "HTTP/0.9": b"GET /function/f\r\n\r\n",
    "HTTP/2.0": b"GET /function/f HTTP/2.0\r\nHost: h\r\n\r\n",
    "HTTP/1.2": b"GET /function/f HTTP/1.2\r\nHost: h\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /function/f HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /function/f HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a space in the target": b"GET /function/f x HTTP/1.1\r\nHost: h\r\n\r\n",
    "a field without a colon": POST + b"Content-Length\r\n\r\n",
    "a space before the first field": b"POST /function/f HTTP/1.1\r\n Host: h\r\n\r\n",
    "no token as method": b"G\x7fT /function/f HTTP/1.1\r\nHost: h\r\n\r\n",
}
TAKEN = {
    "a length": (POST + b"Content-Length: 2" + BODY, [("POST", "/p", "ab")]),
    "chunks": (CHUNKED + b"2\r\nab\r\n0\r\n\r\n", [("POST", "/p", "ab")]),
    "an extension of a chunk": (CHUNKED + b"2;x=\"y\"\r\nab\r\n0;z\r\n\r\n", [("POST", "/p", "ab")]),
    "trailers": (CHUNKED + b"2\r\nab\r\n0\r\nX: 9\r\nHost: x\r\n\r\n", [("POST", "/p", "ab")]),
    "capitals": (POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n2\r\nab\r\n0\r\n\r\n", [("POST", "/p", "ab")]),
    "a tab before a value": (POST + b"Content-Length:\t2" + BODY, [("POST", "/p", "ab")]),
    "two in one write": (
        POST + b"Content-Length: 2" + BODY + EVIL, [("POST", "/p", "ab"), ("GET", "/evil", "")],
    ),
    "a body under GET": (
        b"GET /function/f/g HTTP/1.1\r\nHost: h\r\nContent-Length: 2" + BODY, [("GET", "/g", "ab")],
    ),
    "a length that Connection names": (
        POST + b"Connection: content-length\r\nContent-Length: 2" + BODY, [("POST", "/p", "ab")],
    ),
    "an absolute target": (b"GET http://other/function/f/a HTTP/1.1\r\nHost: h\r\n\r\n", [("GET", "/a", "")]),
    "an encoded line break": (
        b"GET /function/f/a%0d%0aX:1 HTTP/1.1\r\nHost: h\r\n\r\n", [("GET", "/a%0d%0aX:1", "")],
    ),
}  # fmt: skip


class Function:
    """Reads requests as strictly as their heads allow, and keeps what it read."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            lengths = re.findall(rb"(?im)^content-length: (\d+)\r$", request)
            codings = re.findall(rb"(?im)^transfer-encoding: (.*)\r$", request)
            assert len(lengths) + len(codings) <= 1, request
            body = b""
            if lengths:
                body = await reader.readexactly(int(lengths[0]))
            elif codings:
                assert codings == [b"chunked"], request
                while size := int(await reader.readline(), 16):
                    body += (await reader.readexactly(size + 2))[:-2]
                assert await reader.readline() == b"\r\n"
            method, target, version = request.split(b"\r\n", 1)[0].decode().split(" ")
            assert version == "HTTP/1.1"
            self.heads.append(request)
            self.seen.append((method, target, body.decode()))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def _tell(scope: Any, receive: Any, send: Any) -> None:
    """The application of the bare server: as `Function`, but by what ASGI says."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    target = scope["raw_path"].decode().removeprefix("/function/f")
    told = json.dumps([scope["method"], target, body.decode()]).encode()
    length = [(b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": told})


@asynccontextmanager
async def _served(app: Any, protocol: Any) -> AsyncIterator[int]:
    listening = listen("127.0.0.1:0")
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def _said(port: int, sent: bytes, answers: int) -> bytes:
    """What the server says until it ends the connection, or has given so many whole answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        async with asyncio.timeout(20):
            writer.write(sent)
            while (
                len(re.findall(rb"(?s)HTTP/1.1 200 .*?\r\n\r\n(?:ok|\[.*?\])", said)) < answers or not answers
            ):
                part = await reader.read(4096)
                if not part:
                    break
                said += part
            return said
    finally:
        writer.close()


async def by_server(sent: bytes, answers: int = 0) -> tuple[bytes, list[tuple[str, str, str]]]:
    """Answers of the server of router and worker, and what its application read."""
    async with _served(_tell, PassingProtocol) as port:
        answer = await _said(port, sent, answers)
    bodies = re.findall(rb"HTTP/1.1 200 .*?\r\n\r\n(\[.*?\])", answer, re.DOTALL)
    return answer, [(method, target, body) for method, target, body in map(json.loads, bodies)]


async def by_gateway(sent: bytes, answers: int = 0) -> tuple[bytes, list[tuple[str, str, str]]]:
    """Answers of the gateway, and what its function read."""
    function = Function()
    async with Upstream(function).run() as address, proxy_to(address) as proxy:
        app = Gateway(_tell, http=[(b"/function/", proxy)])
        async with _served(app, client_protocol(5.0, 5.0)) as port:
            answer = await _said(port, sent, answers)
    assert all(not re.search(rb"(?im)^(expect|te|trailer|upgrade):", one) for one in function.heads)
    return answer, function.seen


READERS = pytest.mark.parametrize("read", [by_server, by_gateway])


@READERS
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused_and_ends_its_connection(
    read: Callable[..., Any], name: str
) -> None:
    answer, seen = uvloop.run(read(REFUSED[name]))
    # What is wrong with chunks may be found when the function has its head already.
    assert re.match(rb"HTTP/1.1 400 ", answer) or (not answer and name.startswith(("a chunk", "chunks"))), (
        answer
    )
    assert len(re.findall(rb"HTTP/1.1 \d{3} ", answer)) <= 1
    assert seen == []


@READERS
@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_read_in_one_way_is_read_in_that_way(read: Callable[..., Any], name: str) -> None:
    sent, expected = TAKEN[name]
    answer, seen = uvloop.run(read(sent, len(expected)))
    assert (seen, answer.count(b"HTTP/1.1 200 ")) == (expected, len(expected)), answer

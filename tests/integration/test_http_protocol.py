"""The HTTP protocol of router and gateway against clients that offer, lie and flood, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop

from keystage.wire.endpoints import listen
from keystage.wire.http_protocol import HEAD_BYTES, PassingProtocol

Message = MutableMapping[str, Any]
HEAD = b"POST /p HTTP/1.1\r\nHost: h\r\n"


async def tell(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Answers with what the application was told."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    headers = sorted((k.decode(), v.decode()) for k, v in scope["headers"])
    told = json.dumps({"method": scope["method"], "body": body.decode(), "headers": headers}).encode()
    length = [(b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": told})


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    listening = listen("127.0.0.1:0")
    config = uvicorn.Config(tell, http=PassingProtocol, ws="none", lifespan="off", log_level="critical")
    serving = uvicorn.Server(config)
    task = asyncio.create_task(serving.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        serving.should_exit = True
        await task


def exchange(*parts: bytes, end: bool = True) -> bytes:
    """Everything the server says to the parts, sent one after another."""

    async def inside() -> bytes:
        async with asyncio.timeout(20), server() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.02)
                if end:
                    writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b"reset"
            finally:
                writer.close()

    return uvloop.run(inside())


def told(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    found: dict[str, Any] = json.loads(body)
    return found


@pytest.mark.parametrize("more", [b"", b"Upgrade: x\r\nConnection: upgrade\r\n"])
def test_a_tunnel_is_refused_and_nobody_waits(more: bytes) -> None:
    answer = exchange(b"CONNECT a:443 HTTP/1.1\r\nHost: h\r\n" + more + b"\r\n", end=False)
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("is_split", [False, True])
def test_the_body_under_an_offer_arrives(is_split: bool) -> None:
    offer = b"Connection: close, Upgrade, X-Hop\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nX-Hop: 1\r\n"
    parts = (HEAD + offer + b"Content-Length: 5\r\n\r\n", b"plain")
    found = told(exchange(*(parts if is_split else (b"".join(parts),)), end=False))
    assert (found["method"], found["body"]) == ("POST", "plain")
    names = dict(found["headers"])
    assert (names["connection"], "upgrade" in names, names["x-hop"]) == ("close, X-Hop", False, "1")


def test_what_follows_a_last_request_is_not_looked_at() -> None:
    request = HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nab"
    answer = exchange(request + b"GET / HTTP/1.1\r\n\r\n", end=False)
    assert (told(answer)["body"], answer.count(b"HTTP/1.1")) == ("ab", 1)


@pytest.mark.parametrize("is_split", [False, True])
def test_trailers_are_no_headers(is_split: bool) -> None:
    parts = (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", b"X-User: admin\r\n\r\n")
    found = told(exchange(*(parts if is_split else (b"".join(parts),))))
    assert (found["body"], "x-user" in dict(found["headers"])) == ("ab", False)


ENOUGH = HEAD_BYTES + 500
"""Breaks the bound with its end: the server has read all of it when it answers, so the answer arrives."""


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /" + b"a" * ENOUGH + b" HTTP/1.1\r\nHost: h\r\n\r\n"],
        [HEAD + b"X: " + b"y" * ENOUGH + b"\r\n\r\n"],
        [HEAD, *[b"X: " + b"y" * 7_000 + b"\r\n"] * (ENOUGH // 7_000 + 1)],
        [HEAD + b"X: ", *[b"y" * 7_000] * (ENOUGH // 7_000 + 1)],
        [HEAD, b"X: y\r\n" * (ENOUGH // 6)],
    ],
    ids=["target", "one field", "fields", "an endless field", "many at once"],
)
def test_a_head_is_bounded(parts: list[bytes]) -> None:
    answer = exchange(*parts, end=False)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert str(HEAD_BYTES).encode() in answer


TRAILERS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, *[b"X: " + b"y" * 7_000 + b"\r\n"] * 20],
        [HEAD + b"X: ", *[b"y" * 7_000] * 20],
        [HEAD, b"X: y\r\n" * 20_000],
        [TRAILERS, *[b"X: " + b"y" * 7_000 + b"\r\n"] * 20],
    ],
    ids=["fields", "an endless field", "many at once", "trailers"],
)
def test_a_flood_that_goes_on_is_cut_off(parts: list[bytes]) -> None:
    answer = exchange(*parts, end=False)
    # The rest may meet a closed connection, and the answer be lost with it.
    assert answer == b"reset" or answer.startswith(b"HTTP/1.1 431 ")


def test_a_head_within_the_bound_and_a_large_body_in_one_write_are_served() -> None:
    value = b"y" * (HEAD_BYTES - 1000)
    request = HEAD + b"X: " + value + b"\r\nContent-Length: 300000\r\n\r\n" + b"b" * 300_000
    assert len(told(exchange(request))["body"]) == 300_000


def test_trailers_are_bounded() -> None:
    trailers = [b"X: " + b"y" * 7_000 + b"\r\n"] * (ENOUGH // 7_000 + 1)
    assert exchange(TRAILERS, *trailers, end=False).startswith(b"HTTP/1.1 431 ")

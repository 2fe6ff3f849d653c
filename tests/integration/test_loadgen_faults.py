"""Every fault of a server or network is a row of its class; what is no fault is served. Real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from support.scripted_upstream import Script, Upstream, head
from support.sender_world import ask, client_of

from keystage.loadgen import sender
from keystage.loadgen.sending.route import Reading
from keystage.loadgen.sending.row import Row
from keystage.loadgen.target import Target

Runner = Callable[[Coroutine[Any, Any, Any]], Any]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":" a"}]}\n\n'


@pytest.fixture(params=[uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


def says(*parts: bytes, then: str = "close") -> Script:
    """A script that reads a request whole, writes, and then closes, waits for ever, or resets."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        await reader.readexactly(1)
        for part in parts:
            writer.write(part)
            await writer.drain()
        if then == "wait":
            await asyncio.Event().wait()
        if then == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    return script


async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request."""
    while True:
        await head(reader)
        await reader.readexactly(1)
        writer.write(OK)


def asked(
    run: Runner, script: Script, reading: Reading = "times", times: int = 1, **changes: Any
) -> tuple[list[Row], int, int]:
    """Sends requests one after another: rows, connections that the server saw, requests moved."""

    async def sent() -> tuple[list[Row], int, int]:
        upstream = Upstream(script)
        async with upstream.run() as address, client_of(f"http://{address}/p", reading, **changes) as client:
            rows = [await ask(client) for _ in range(times)]
            return rows, upstream.connections, client.moved

    made: tuple[list[Row], int, int] = run(sent())
    return made


@pytest.mark.parametrize(
    ("script", "reading", "error"),
    [
        (says(), "times", "disconnected: the server ended the connection without an answer"),
        (says(OK[:-1]), "times", "disconnected: the server ended the connection within the answer"),
        (says(OK[:20]), "times", "disconnected: the server ended the connection within the answer"),
        (says(CHUNKED + b"2\r\nok\r\n"), "times", "disconnected: the server ended the connection within"),
        (says(OK[:-1], then="reset"), "times", "disconnected: "),
        (says(b"SSH-2.0-OpenSSH_9\r\n", then="wait"), "times", "bad_answer: "),
        (says(CHUNKED + b"zz\r\n", then="wait"), "times", "bad_answer: "),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, then="wait"), "times", "bad_answer: a head of over"),
        (
            says(*[b"HTTP/1.1 100 Continue\r\n\r\n" * 1000] * 3, then="wait"),
            "times",
            "bad_answer: a head of over",
        ),
        (
            says(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", then="wait"
            ),
            "times",
            "bad_answer: the server switched",
        ),
        (says(OK), "json", "bad_answer: JSON is malformed"),
        (says(CHUNKED + b"0\r\n\r\n"), "stream", "truncated: the stream ended without [DONE]"),
        (
            says(CHUNKED + b"2000000\r\ndata: " + b"a" * (5 << 20), then="wait"),
            "stream",
            "bad_answer: an event of over",
        ),
        (says(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull"), "stream", "http_503: full"),
    ],
    ids=[
        "closes-unanswered", "closes-in-body", "closes-in-head", "closes-in-chunks", "resets", "no-http",
        "no-chunk", "huge-head", "endless-continue", "upgrade", "no-json", "no-done", "huge-event", "status",
    ],
)  # fmt: skip
def test_a_fault_is_a_row_of_its_class(run: Runner, script: Script, reading: Reading, error: str) -> None:
    (row,), connections, moved = asked(run, script, reading)
    assert row.error.startswith(error)
    assert row.last_s >= row.sent_s >= row.scheduled_s
    assert (connections, moved, row.attempts) == (1, 0, 1), "nothing is tried twice"


def test_no_answer_is_a_timeout(run: Runner) -> None:
    (row,), _, _ = asked(run, says(then="wait"), timeout_s=0.2)
    assert (row.error, row.status) == ("timeout: no complete answer in time", 0)
    assert row.last_s - row.sent_s >= 0.2


def test_a_stalled_stream_keeps_the_tokens_that_came(run: Runner) -> None:
    stall = says(CHUNKED + b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), then="wait")
    (row,), _, _ = asked(run, stall, "stream", timeout_s=0.5)
    assert (row.error_class, row.status, row.output_tokens) == ("timeout", 200, 1)
    assert row.first_s is not None
    assert row.sent_s <= row.first_s < row.last_s


@pytest.mark.parametrize(
    "script",
    [
        says(OK),
        says(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, then="wait"),
        says(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", OK, then="wait"),
        says(CHUNKED + b"1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n", then="wait"),
        says(b"HTTP/1.1 200 OK\r\n\r\n", b"until", b" the end"),
        says(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", then="wait"),
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", then="wait"),
        says(*(OK[place : place + 1] for place in range(len(OK))), then="wait"),
    ],
    ids=["length", "continue", "hints", "chunked", "until-close", "http-1.0", "empty", "byte-by-byte"],
)
def test_whole_answers_are_served(run: Runner, script: Script) -> None:
    (row,), _, _ = asked(run, script)
    assert (row.error, row.status, row.attempts) == ("", 200, 1)
    assert row.first_s is not None
    assert row.sent_s <= row.first_s <= row.last_s


def test_connections_are_kept(run: Runner) -> None:
    rows, connections, _ = asked(run, forever, times=5)
    assert [row.error for row in rows] == [""] * 5
    assert connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad",
        OK + b"rubbish",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["second-answer", "rubbish", "said-close", "http-1.0"],
)
def test_a_connection_in_doubt_is_not_used_again(run: Runner, answer: bytes) -> None:
    rows, connections, moved = asked(run, says(answer, then="wait"), times=3)
    assert [row.error for row in rows] == [""] * 3
    assert (connections, moved) == (3, 0)


def test_a_server_that_ends_kept_connections_fails_nobody(run: Runner) -> None:
    """It answers, and ends the connection without a word; each request finds another one."""
    rows, connections, _ = asked(run, says(OK), times=20)
    assert [(row.error, row.attempts) for row in rows] == [("", 1)] * 20
    assert connections == 20


def test_a_body_that_the_server_does_not_read_costs_the_connection(run: Runner) -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 413 No\r\nContent-Length: 5\r\n\r\nlarge")
        await asyncio.Event().wait()

    async def sent() -> tuple[Row, Row, int]:
        upstream = Upstream(refuses)
        async with upstream.run() as address, client_of(f"http://{address}/") as client:
            first, second = await ask(client, bytes(32 << 20)), await ask(client, bytes(32 << 20))
            return first, second, upstream.connections

    first, second, connections = run(sent())
    assert (first.error, second.error, connections) == ("http_413: large", "http_413: large", 2)


def test_retries_are_asked_for_and_counted(run: Runner) -> None:
    answered = 0

    async def third_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        while True:
            await head(reader)
            await reader.readexactly(1)
            answered += 1
            if answered == 1:
                return
            writer.write(OK if answered == 3 else b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")

    (row,), _, moved = asked(run, third_time, retries=2)
    assert (row.error, row.status, row.attempts, answered, moved) == ("", 200, 3, 3, 0)
    assert row.last_s - row.sent_s >= 0.15, "0.05 s and 0.1 s of waiting count as latency"
    (given_up,), _, _ = asked(run, says(), retries=1)
    assert (given_up.error_class, given_up.attempts) == ("disconnected", 2)


def test_nobody_listening_and_no_such_name(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def one(url: str) -> Row:
        async with client_of(url) as client:
            return await ask(client)

    refused = run(one(f"http://127.0.0.1:{port}/"))
    assert refused.error.startswith(f"connect: 127.0.0.1:{port}: ")
    unknown = run(one("http://no-such-host.invalid/"))
    assert unknown.error.startswith("dns: no-such-host.invalid: ")
    assert (refused.status, unknown.status, refused.attempts) == (0, 0, 1)


def test_no_tls_where_tls_was_asked_for(run: Runner) -> None:
    async def speaks_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async def sent() -> Row:
        async with Upstream(speaks_plainly).run() as address, client_of(f"https://{address}/") as client:
            return await ask(client)

    assert run(sent()).error_class == "tls"


def test_a_server_that_ends_connections_at_once_is_not_stormed(run: Runner) -> None:
    """It resets each connection when it is made, before anything is sent: one attempt, one failure."""
    linger = struct.pack("ii", 1, 0)

    async def sent() -> tuple[Row, int]:
        loop = asyncio.get_running_loop()
        accepted = 0

        async def accept(listening: socket.socket) -> None:
            nonlocal accepted
            while True:
                taken, _ = await loop.sock_accept(listening)
                accepted += 1
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                taken.close()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            accepting = asyncio.create_task(accept(listening))
            async with client_of(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=2.0) as client:
                row = await ask(client)
            accepting.cancel()
            return row, accepted

    row, accepted = run(sent())
    assert row.error_class == "disconnected"
    assert accepted == 1


def test_what_cannot_be_a_name_is_no_timeout(run: Runner) -> None:
    async def one() -> Row:
        async with client_of(f"http://{'a' * 70}.example/") as client:
            return await ask(client)

    row = run(one())
    assert row.error_class == "dns"
    assert row.last_s - row.sent_s < 20


def test_a_redirection_is_an_answer_and_is_not_followed() -> None:
    """From the caller's own loop too: else a GET of another page would be timed."""

    async def one() -> tuple[Row, Row, int]:
        moved = b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n"
        upstream = Upstream(says(moved))
        async with upstream.run() as address, client_of(f"http://{address}/") as ours:
            own, target = Row(0, 0.0), Target("raw", f"http://{address}")
            async with sender.client(30.0) as session:
                await sender.send(session, target, own, b"x", 0.0)
            return own, await ask(ours), upstream.connections

    own, ours, connections = asyncio.run(one())
    assert (own.error, ours.error, connections) == ("http_302: ", "http_302: ", 2)

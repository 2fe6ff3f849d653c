"""Clients that are slow, old, in a hurry or gone, over the gateway's real server on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from support.scripted_upstream import Upstream, head, proxy_to, run

from keystage.gateway.app import Gateway
from keystage.gateway.incoming import Receive
from keystage.gateway.proxy import Proxy, Scope, Send
from keystage.gateway.server import client_protocol
from keystage.gateway.websocket import WebSocketProxy

WAIT_S = 1.0
"""Bound of what a client may owe, unless a test names its own."""
LONG_S = 2.0
"""Such a bound for clients that are slow but within it: their pauses are far below, their sum above."""
MAX_BODY = 1 << 20
GET = b"GET /function/f HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /function/f HTTP/1.1\r\nHost: h\r\n"
HANDSHAKE = (
    b" HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def late_reader(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for management: reads a body late, refuses `/large` without reading it."""
    status, headers = 200, [(b"content-length", b"2")]
    if scope["path"] == "/large":
        status, headers = 413, [*headers, (b"connection", b"close")]
    else:
        await asyncio.sleep(1.3 * LONG_S)
        while (await receive())["more_body"]:
            pass
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


class Echo:
    """A function that answers with what it got; `/chunks` in chunks, `/early` before it reads a body.

    Attributes:
        seen: requests that came whole.
        cut: requests that did not.
        lost: connections that ended while `/endless` was answered.
    """

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.cut: list[bytes] = []
        self.lost = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            path = request.split(b" ", 2)[1]
            if path in (b"/early", b"/chunks", b"/broken", b"/endless"):
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            try:
                while path == b"/endless":
                    writer.write(b"1\r\n.\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except (ConnectionError, RuntimeError) as error:  # uvloop's, of a closed transport
                self.lost += 1
                raise ConnectionResetError from error
            if path == b"/broken":
                return
            length = re.search(rb"content-length: (\d+)", request)
            try:
                size = int(b"transfer-encoding" in request)
                while size:
                    size = int(await reader.readline() or b"x", 16)
                    request += await reader.readexactly(size + 2)
                if length:
                    request += await reader.readexactly(int(length[1]))
            except (asyncio.IncompleteReadError, ValueError) as error:
                self.cut.append(request + getattr(error, "partial", b""))
                return
            self.seen.append(request)
            if path in (b"/early", b"/chunks"):
                writer.write(b"5\r\nworld\r\n0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(request), request))


@dataclasses.dataclass
class Rig:
    """A gateway before one function."""

    port: int
    proxy: Proxy
    echo: Echo
    server: uvicorn.Server

    @property
    def in_flight(self) -> int:
        return self.proxy._metrics.in_flight("f")

    async def ask(self, *parts: bytes, pause_s: float = 0.0) -> bytes:
        """Sends parts and reads to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(15):
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(pause_s)
                return await reader.read()
        finally:
            writer.close()

    async def settled(self) -> None:
        """Waits until nothing is in flight."""
        async with asyncio.timeout(30):
            while self.in_flight:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(
    stall_s: float = WAIT_S, *, head_s: float = WAIT_S, age_s: float = math.inf
) -> AsyncIterator[Rig]:
    echo = Echo()
    async with (
        Upstream(echo).run() as address,
        proxy_to(address, max_body_bytes=MAX_BODY) as proxy,
    ):
        websocket = WebSocketProxy(
            proxy._replicas, proxy._metrics, max_message_bytes=MAX_BODY, upstream_s=5.0
        )
        options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_config": None, "port": 0}
        server = uvicorn.Server(
            uvicorn.Config(
                Gateway(late_reader, http=[(b"/function/", proxy)], websocket=websocket),
                http=client_protocol(stall_s, head_s, age_s=age_s),
                ws="websockets-sansio",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=1,
                **options,
            )
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Rig(port, proxy, echo, server)
        finally:
            server.should_exit = True
            await serving


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ((b"",), b""),
        ((b"GET /fun",), b"HTTP/1.1 408 "),
        ((GET, b"\r\n"), b"HTTP/1.1 200 "),
        ((GET, b"GET /fun"), b"HTTP/1.1 200 "),
    ],
)
def test_a_head_that_does_not_come_ends_its_connection(sent: tuple[bytes, ...], answer: bytes) -> None:
    async def work() -> None:
        async with gateway() as rig:
            got = await rig.ask(*sent, pause_s=0.1)
            assert got.startswith(answer)
            assert (b" 408 " in got) == (sent != (b"",))
            assert not rig.server.server_state.connections

    run(work())


@pytest.mark.parametrize(("age_s", "is_old"), [(60.0, False), (0.0, True)])
def test_an_old_connection_ends_with_its_next_answer(age_s: float, is_old: bool) -> None:
    async def work() -> None:
        async with gateway(age_s=age_s) as rig:
            got = await rig.ask(GET)  # to the end: where it is not old, that of a connection at rest
            assert got.startswith(b"HTTP/1.1 200 ")
            assert (b"connection: close" in got) == is_old
            assert got.partition(b"\r\n\r\n")[2] == rig.echo.seen[0]

    run(work())


def test_connections_of_an_age_do_not_all_end_together() -> None:
    async def work() -> None:
        async with gateway(head_s=60.0, age_s=60.0) as rig:
            opened = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(50)]
            async with asyncio.timeout(30):
                while len(rig.server.server_state.connections) < len(opened):
                    await asyncio.sleep(0.01)
            old_s = [each.old_s for each in rig.server.server_state.connections]
            for _, writer in opened:
                writer.close()
        assert max(old_s) - min(old_s) > 4  # of 12 over which fifty are spread

    run(work())


@pytest.mark.parametrize(
    "body", [b"Content-Length: 10\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"]
)
def test_a_body_that_stops_is_answered_408_and_frees_its_replica(body: bytes) -> None:
    async def work() -> None:
        async with gateway() as rig:
            got = await rig.ask(POST + body)
            assert got.startswith(b"HTTP/1.1 408 ")
            assert b"no part of the request's body came for 1 s" in got
            await rig.settled()
            async with asyncio.timeout(30):
                while not rig.echo.cut:
                    await asyncio.sleep(0.01)
            assert (rig.echo.seen, b"ab" in rig.echo.cut[0]) == ([], True)

    run(work())


def test_a_body_that_stops_under_an_answer_breaks_it_off() -> None:
    async def work() -> None:
        async with gateway() as rig:
            got = await rig.ask(
                POST.replace(b"/f ", b"/f/early ") + b"Content-Length: 10\r\n\r\n", b"ab", pause_s=0.1
            )
            assert got.endswith(b"5\r\nhello\r\n")
            await rig.settled()
            assert rig.echo.seen == []
            with pytest.raises(ConnectionResetError):  # the answer's end is the connection's
                await rig.ask(b"POST /function/f/early HTTP/1.0\r\nContent-Length: 10\r\n\r\nab")

    run(work())


def test_a_request_that_turns_out_to_be_none_frees_its_replica_while_its_client_stays() -> None:
    async def work() -> None:
        async with gateway(stall_s=30.0) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
            async with asyncio.timeout(30):
                while not rig.in_flight:
                    await asyncio.sleep(0.01)
                writer.write(b"no size\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
                while rig.in_flight:
                    await asyncio.sleep(0.01)
            assert rig.echo.seen == []
            writer.close()

    run(work())


@pytest.mark.slow
def test_a_slow_body_and_one_that_is_read_late_are_taken() -> None:
    async def work() -> None:
        async with gateway(stall_s=LONG_S) as rig:
            close = b"Connection: close\r\nContent-Length: 4\r\n"
            slow = rig.ask(POST + close + b"\r\n", b"a", b"b", b"c", b"d", pause_s=0.3 * LONG_S)
            assert (await slow).endswith(b"abcd")
            asked = POST.replace(b"/function/f", b"/late") + close + b"Expect: 100-continue\r\n\r\n"
            late = await rig.ask(asked, b"", b"abcd", pause_s=0.7 * LONG_S)
            assert late.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
            size = 1 << 19  # more than is read before the application asks
            large = (
                POST.replace(b"/function/f", b"/late") + b"Connection: close\r\nContent-Length: %d\r\n\r\n"
            )
            assert (await rig.ask(large % size + bytes(size))).startswith(b"HTTP/1.1 200 ")

    run(work())


def test_a_client_that_left_with_requests_in_line_is_noticed() -> None:
    async def work() -> None:
        async with gateway() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(GET.replace(b"/f ", b"/f/endless ") * 3)
            assert b" 200 " in await reader.readline()
            writer.close()
            await rig.settled()
            async with asyncio.timeout(30):
                while not rig.echo.lost:
                    await asyncio.sleep(0.01)

    run(work())


def test_an_http_1_0_client_gets_no_chunks_and_sees_an_answer_broken_off() -> None:
    async def work() -> None:
        async with gateway() as rig:
            answer = await rig.ask(b"GET /function/f/chunks HTTP/1.0\r\n\r\n")
            top, _, body = answer.partition(b"\r\n\r\n")
            assert (body, b"transfer-encoding" in top.lower()) == (b"helloworld", False)
            answer = await rig.ask(b"GET /function/f/whole HTTP/1.0\r\n\r\n")
            assert b"GET /whole HTTP/1.1" in answer
            with pytest.raises(ConnectionResetError):
                await rig.ask(b"GET /function/f/broken HTTP/1.0\r\n\r\n")

    run(work())


@pytest.mark.parametrize(
    ("target", "fields", "answer"),
    [
        (b"", b"Cookie: " + b"a" * 9000 + b"\r\n", b"HTTP/1.1 431 "),
        (b"", b"".join(b"X-%d: 1\r\n" % k for k in range(130)), b"HTTP/1.1 431 "),
        (b"?" + b"a" * 9000, b"", b"HTTP/1.1 414 "),
    ],
)
def test_a_handshake_beyond_the_bounds_is_answered(target: bytes, fields: bytes, answer: bytes) -> None:
    async def work() -> None:
        async with gateway() as rig:
            got = await rig.ask(b"GET /function/f" + target + HANDSHAKE + fields + b"\r\n")
            assert got.startswith(answer)
            assert not rig.server.server_state.connections

    run(work())


@pytest.mark.parametrize("path", ["/function/f", "/large"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_still_sends_reads_why_it_was_refused(path: str, is_chunked: bool) -> None:
    def post(port: int) -> int:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        parts = [bytes(1 << 16)] * 128
        with contextlib.closing(client):
            if is_chunked:
                client.request(
                    "POST", path, iter(parts), {"Transfer-Encoding": "chunked"}, encode_chunked=True
                )
            else:
                client.request("POST", path, b"".join(parts))
            return client.getresponse().status

    async def work() -> None:
        async with gateway(stall_s=5.0) as rig:
            for _ in range(5):
                assert await asyncio.to_thread(post, rig.port) == 413
            async with asyncio.timeout(30):
                while rig.server.server_state.connections:
                    await asyncio.sleep(0.01)

    run(work())


def test_after_an_early_refusal_the_rest_of_the_request_is_thrown_away_in_time() -> None:
    async def work() -> None:
        async with gateway() as rig:
            unknown = POST.replace(b"/function/f", b"/function/g") + b"Content-Length: 4\r\n\r\nab"
            answers = await rig.ask(unknown, b"cd" + GET, pause_s=0.1)
            assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"404", b"200"]
            assert (await rig.ask(unknown)).startswith(b"HTTP/1.1 404 ")

    run(work())


def test_a_function_is_told_one_call_id_and_one_start_time() -> None:
    async def work() -> None:
        async with gateway() as rig:
            named = b"X-Start-Time: 1\r\nX-Call-Id: mine\r\nConnection: close, x-call-id, x-start-time\r\n"
            await rig.ask(GET.removesuffix(b"\r\n") + named + b"\r\n")
            (request,) = rig.echo.seen
            assert re.findall(rb"\r\nx-call-id: (\w+)", request) == [b"mine"]
            (start,) = re.findall(rb"\r\nx-start-time: (\d+)", request)
            assert int(start) > 1

    run(work())

"""The sender over HTTP/2: nginx by prior knowledge and by ALPN, and every fault on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import h2.errors
import h2.settings
import hyperframe.frame
import pytest
import uvloop
from support.h2_server import Answer, Connection, Server
from support.sender_world import WAIT_S, ask, client_of, plan_of, write_certificate
from support.servers import free_port, need_program

from keystage.loadgen.sending.http2 import Http2Connection
from keystage.loadgen.sending.route import Reading
from keystage.loadgen.sending.row import Row
from keystage.loadgen.sending.run import run_plan
from keystage.loadgen.target import Target

TOKEN = b'data: {"choices":[{"text":" a"}]}\n\n'


@contextlib.contextmanager
def nginx(folder: Path, listen: str) -> Iterator[None]:
    """nginx in the foreground that answers every request with 200."""
    program = need_program("nginx")
    config = folder / "nginx.conf"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 256; }}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
 fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
 server {{ {listen} location / {{ return 200 "ok\n"; }} }} }}"""
    )
    with subprocess.Popen([program, "-p", str(folder), "-c", str(config)]) as process:
        try:
            yield
        finally:
            process.terminate()


def _await_port(port: int) -> None:
    import socket

    until_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_nginx_by_prior_knowledge(tmp_path: Path) -> None:
    port = free_port()
    limit = "keepalive_requests 50;"  # GOAWAY after so many: those that it did not take move
    with nginx(tmp_path, f"listen 127.0.0.1:{port} http2; {limit}"):
        _await_port(port)
        target = Target("raw", f"http://127.0.0.1:{port}")
        rows = run_plan(plan_of([0.001 * k for k in range(300)]), target, processes=2, http="2")
    assert [(row.index, row.status, row.error, row.attempts) for row in rows] == [
        (index, 200, "", 1) for index in range(300)
    ]


@pytest.mark.parametrize(("http", "listen"), [("2", "ssl http2"), ("1.1", "ssl"), ("2", "ssl")])
def test_nginx_over_tls(http: str, listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path)
    port = free_port()
    secured = f"listen localhost:{port} {listen}; ssl_certificate {certificate}; ssl_certificate_key {key};"
    with nginx(tmp_path, secured):
        _await_port(port)
        target = Target("raw", f"https://localhost:{port}")
        plan = plan_of([0.005 * k for k in range(40)])
        (stranger,) = run_plan(plan_of([0.0]), target, http="2" if http == "2" else "1.1", timeout_s=WAIT_S)
        assert stranger.error_class == "tls", "its certificate is nobody's"
        monkeypatch.setitem(os.environ, "SSL_CERT_FILE", str(certificate))
        rows = run_plan(plan, target, http="2" if http == "2" else "1.1", timeout_s=WAIT_S)
    if http == "2" and listen == "ssl":
        assert {row.error_class for row in rows} == {"tls"}
        assert all("protocol" in row.error for row in rows), "the server agreed to none, or to HTTP/1.1"
    else:
        assert {(row.status, row.error) for row in rows} == {(200, "")}


def asked(
    answer: Answer, reading: Reading = "times", times: int = 1, body: bytes = b"x", timeout_s: float = WAIT_S
) -> tuple[list[Row], Server, int]:
    """Sends requests one after another: rows, server, requests moved."""
    server = Server(answer)

    async def sent() -> tuple[list[Row], int]:
        async with (
            server.run() as url,
            client_of(url, reading, http="2", timeout_s=timeout_s) as client,
        ):
            return [await ask(client, body) for _ in range(times)], client.moved

    rows, moved = uvloop.run(sent())
    return rows, server, moved


def test_one_connection_carries_all() -> None:
    rows, server, _ = asked(Connection.ok, times=5)
    assert [(row.status, row.error) for row in rows] == [(200, "")] * 5
    assert len(server.connections) == 1


@pytest.mark.parametrize("size", [0, 1, 65_535, 300_000])
def test_bodies_wait_for_the_servers_window(size: int) -> None:
    (row,), server, _ = asked(Connection.ok, body=bytes(size))
    assert row.error == ""
    assert list(server.connections[0].bodies.values()) == [size]


def test_more_requests_at_once_than_streams_take_more_connections() -> None:
    """The server answers nobody before all 25 have come, and takes 10 on a connection."""
    held: list[tuple[Connection, int]] = []

    def hold(connection: Connection, stream: int) -> None:
        held.append((connection, stream))
        if len(held) == 25:
            for other, number in held:
                other.ok(number)
                other.flush()

    server = Server(hold, most_streams=10)

    async def sent() -> list[Row]:
        rows = [Row(index, 0.0) for index in range(25)]
        async with server.run() as url, client_of(url, http="2") as client:
            for row in rows:
                client.send(row, b"x")
            await client.finish()
        return rows

    rows = uvloop.run(sent())
    assert [(row.status, row.error, row.attempts) for row in rows] == [(200, "", 1)] * 25
    assert len(server.connections) == 3


def _refuse(connection: Connection, stream: int) -> None:
    if connection.server.requests == 1:
        connection.h2.reset_stream(stream, h2.errors.ErrorCodes.REFUSED_STREAM)
    else:
        connection.ok(stream)


def _go_away(connection: Connection, stream: int) -> None:
    """Ends its first connection when the second request on it comes, and says that it did not take it."""
    if stream == 3 and connection is connection.server.connections[0]:
        connection.h2.close_connection(last_stream_id=1)
    else:
        connection.ok(stream)


@pytest.mark.parametrize(("answer", "connections"), [(_refuse, 1), (_go_away, 2)])
def test_what_the_server_says_it_did_not_process_moves(answer: Answer, connections: int) -> None:
    rows, server, moved = asked(answer, times=3)
    assert [(row.status, row.error, row.attempts) for row in rows] == [(200, "", 1)] * 3
    assert (len(server.connections), moved) == (connections, 1)


def test_a_server_that_refuses_for_ever_is_a_failure() -> None:
    def refuse(connection: Connection, stream: int) -> None:
        connection.h2.reset_stream(stream, h2.errors.ErrorCodes.REFUSED_STREAM)

    (row,), server, moved = asked(refuse)
    assert row.error == "disconnected: the server reset the stream (REFUSED_STREAM)"
    assert server.requests == moved + 1


def test_what_the_server_took_before_goaway_is_answered() -> None:
    """It says that it ends after stream 5, and answers the three it has taken afterwards; the rest move."""

    def answer(connection: Connection, stream: int) -> None:
        first = connection is connection.server.connections[0]
        if first and stream == 5:
            goaway = hyperframe.frame.GoAwayFrame(0, last_stream_id=5, error_code=0).serialize()
            connection.flush()
            connection.transport.write(goaway)
            for taken in (1, 3, 5):
                connection.ok(taken)
        elif not first:
            connection.ok(stream)

    server = Server(answer)

    async def sent() -> tuple[list[Row], int]:
        rows = [Row(index, 0.0) for index in range(6)]
        async with server.run() as url, client_of(url, http="2") as client:
            for row in rows:
                client.send(row, b"x")
            await client.finish()
            return rows, client.moved

    rows, moved = uvloop.run(sent())
    assert [(row.status, row.error, row.attempts) for row in rows] == [(200, "", 1)] * 6
    assert (moved, len(server.connections)) == (3, 2)


def test_a_body_answered_unread_ends_its_stream() -> None:
    """The answer comes before the body is sent: no stream stays open for it."""
    server = Server(Connection.ok)

    def early(connection: Connection, stream: int) -> None:
        connection.ok(stream, status=413)

    server.early = early

    async def sent() -> tuple[Row, Row, int]:
        async with server.run() as url, client_of(url, http="2") as client:
            first, second = await ask(client, bytes(1 << 20)), await ask(client, bytes(1 << 20))
            (connection,) = next(iter(client._connections.values()))._open
            assert isinstance(connection, Http2Connection)
            return first, second, connection._h2.open_outbound_streams

    first, second, still_open = uvloop.run(sent())
    assert [first.error, second.error] == ["http_413: ok"] * 2
    assert still_open == 0


def test_a_server_of_http_1_is_named() -> None:
    async def sent() -> Row:
        async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(refuses, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, client_of(f"http://127.0.0.1:{port}/", http="2") as client:
            return await ask(client)

    assert uvloop.run(sent()).error_class in ("bad_answer", "disconnected")


def _reset(connection: Connection, stream: int) -> None:
    connection.h2.reset_stream(stream, h2.errors.ErrorCodes.INTERNAL_ERROR)


def _close_in_answer(connection: Connection, stream: int) -> None:
    connection.head(stream)
    connection.flush()
    connection.transport.close()


def _rubbish(connection: Connection, stream: int) -> None:
    connection.transport.write(bytes((0, 0, 1, 0, 0, 0, 0, 0, 0, 0)))  # data of no stream


def _go_away_processed(connection: Connection, stream: int) -> None:
    connection.h2.close_connection(last_stream_id=stream)
    connection.flush()
    connection.transport.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_reset, "disconnected: the server reset the stream (INTERNAL_ERROR)"),
        (_close_in_answer, "disconnected: the server ended the connection within the answer"),
        (_go_away_processed, "disconnected: the server ended the connection within the answer"),
        (_rubbish, "bad_answer: "),
        (lambda connection, stream: connection.ok(stream, b"full", 503), "http_503: full"),
        (lambda connection, stream: connection.ok(stream, b"{"), "bad_answer: Input data was truncated"),
    ],
)
def test_a_fault_is_a_row_of_its_class(answer: Answer, error: str) -> None:
    (row,), server, moved = asked(answer, "json")
    assert row.error.startswith(error)
    assert (row.attempts, moved, server.requests) == (1, 0, 1)


def test_a_timeout_resets_the_stream_and_keeps_the_connection() -> None:
    def first_never(connection: Connection, stream: int) -> None:
        if stream > 1:
            connection.ok(stream)

    (first, second), server, _ = asked(first_never, times=2, timeout_s=0.3)
    assert (first.error_class, second.error) == ("timeout", "")
    assert len(server.connections) == 1


def test_streams_are_read_token_by_token() -> None:
    def stream_two(connection: Connection, stream: int) -> None:
        connection.head(stream)
        for _ in range(2):
            connection.h2.send_data(stream, TOKEN)
        connection.h2.send_data(stream, b"data: [DONE]\n\n", end_stream=True)

    (row,), _, _ = asked(stream_two, "stream")
    assert (row.error, row.output_tokens) == ("", 2)


def _bound(connection: Connection, most_streams: int) -> None:
    connection.h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: most_streams})
    connection.flush()


@pytest.mark.parametrize("first", [0, 1])
def test_a_bound_on_streams_that_is_raised_is_used(first: int) -> None:
    """One that takes none is waited for; one that was full is used again when it takes more."""
    held: list[int] = []

    def answer(connection: Connection, stream: int) -> None:
        if stream == 1 and first == 1:
            _bound(connection, 8)
        connection.ok(stream)
        held.append(stream)

    server = Server(answer, most_streams=first)

    async def sent() -> list[Row]:
        rows = [Row(index, 0.0) for index in range(4)]
        async with server.run() as url, client_of(url, http="2") as client:
            client.send(rows[0], b"x")
            async with asyncio.timeout(WAIT_S):
                while not server.connections:
                    await asyncio.sleep(0.01)
            if first == 0:
                await asyncio.sleep(0.1)  # long enough for many connections, were they made
                _bound(server.connections[0], 8)
            await client.finish()
            for row in rows[1:]:
                client.send(row, b"x")
                await client.finish()
        return rows

    rows = uvloop.run(sent())
    assert [row.error for row in rows] == [""] * 4
    assert len(server.connections) == 1


def test_a_connection_that_is_stuck_holds_up_nobody_for_ever() -> None:
    """The server says nothing on its first connection: that request times out, the next one is served."""

    class Mute(Server):
        @contextlib.asynccontextmanager
        async def run(self) -> AsyncIterator[str]:
            loop = asyncio.get_running_loop()
            made: list[asyncio.Protocol] = []

            def protocol() -> asyncio.Protocol:
                made.append(asyncio.Protocol() if not made else Connection(self))
                return made[-1]

            server = await loop.create_server(protocol, "127.0.0.1", 0)
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            finally:
                for connection in self.connections:
                    connection.transport.abort()
                server.close()

    async def sent() -> tuple[Row, Row]:
        async with Mute(Connection.ok).run() as url, client_of(url, http="2", timeout_s=1.0) as client:
            return await ask(client), await ask(client)

    first, second = uvloop.run(sent())
    assert (first.error_class, second.error) == ("timeout", "")


def test_a_connection_that_ends_after_its_settings_is_not_stormed() -> None:
    class Ending(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.h2.close_connection(last_stream_id=0)
            self.flush()

    made: list[Ending] = []

    async def sent() -> Row:
        server = Server(Connection.ok)

        def protocol() -> Ending:
            made.append(Ending(server))
            return made[-1]

        loop = asyncio.get_running_loop()
        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with client_of(f"http://127.0.0.1:{port}/", http="2", timeout_s=2.0) as client:
            row = await ask(client)
        listening.close()
        return row

    row = uvloop.run(sent())
    assert row.error_class == "disconnected"
    assert len(made) == 1

"""The race on kept connections: what the server cannot have processed moves, all else is a failure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvloop
from support.sender_world import ask, client_of

from keystage.loadgen.sending import http1
from keystage.loadgen.sending.http1 import Http1Connection, heard
from keystage.loadgen.sending.row import Row

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
WAIT_S = 30.0
_CLOSE_WAIT = 8


class Server:
    """A blocking server in a thread: answers the first request of each connection; then it is told.

    Attributes:
        requests: bytes of each request read.
        end: set to let it end the connection that it has just served.
        reads_second: whether it reads a second request before it ends the connection.
    """

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.end = threading.Event()
        self.reads_second = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/"
        self._thread = threading.Thread(target=self._serve)

    @contextlib.contextmanager
    def run(self) -> Iterator[Server]:
        self._thread.start()
        try:
            yield self
        finally:
            self.end.set()
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                connection.settimeout(WAIT_S)
                with connection:
                    self.requests.append(connection.recv(65536))
                    connection.sendall(OK)
                    if self.reads_second:
                        self.requests.append(connection.recv(65536))
                    else:
                        self.end.wait(WAIT_S)


def _await_state(descriptor: int, state: int) -> None:
    """Waits, without the event loop, until TCP has come to a state."""
    until_s = time.monotonic() + WAIT_S
    while heard(descriptor)[0] != state:
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_ended_before_the_request_it_moves(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends the connection before the request reaches it: before we look, or after we looked."""
    server = Server()

    def looked(descriptor: int) -> tuple[int, int]:
        told = heard(descriptor)
        if moment == "between" and not server.end.is_set():
            server.end.set()
            _await_state(descriptor, _CLOSE_WAIT)
        return told

    monkeypatch.setattr(http1, "heard", looked)

    async def sent() -> tuple[Row, Row, int, int]:
        async with client_of(server.url) as client:
            first = await ask(client)
            if moment == "before":
                (kept,) = next(iter(client._connections.values()))._open
                assert isinstance(kept, Http1Connection)
                server.end.set()
                _await_state(kept._descriptor, _CLOSE_WAIT)  # the loop has not heard of it
            second = await ask(client)
            return first, second, client.moved, client.opened

    with server.run():
        first, second, moved, opened = uvloop.run(sent())
    assert (first.error, second.error, second.attempts) == ("", "", 1)
    assert opened == 2
    assert moved == (1 if moment == "between" else 0)
    assert len(server.requests) == 2, "the server got each request once"


def test_ended_after_reading_it_is_a_failure() -> None:
    """A server that has read the request may have processed it: it is not sent again."""
    server = Server()
    server.reads_second = True

    async def sent() -> tuple[Row, Row, int]:
        async with client_of(server.url) as client:
            return await ask(client), await ask(client), client.moved

    with server.run():
        first, second, moved = uvloop.run(sent())
    assert first.error == ""
    assert second.error.startswith("disconnected: the server ended the connection without an answer")
    assert (second.attempts, moved, len(server.requests)) == (1, 0, 2)


def test_idle_connections_are_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.loadgen.sending.connections.KEEP_ALIVE_S", 0.1)
    server = Server()

    async def sent() -> int:
        async with client_of(server.url) as client:
            await ask(client)
            opened = next(iter(client._connections.values()))._open
            async with asyncio.timeout(WAIT_S):
                while opened:
                    await asyncio.sleep(0.01)
            server.end.set()
            return client.opened

    with server.run():
        assert uvloop.run(sent()) == 1

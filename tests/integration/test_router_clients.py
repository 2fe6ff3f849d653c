"""Clients that are many, slow, or send much: the router's protocol over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from keystage.router.client_protocol import Clients
from keystage.router.face_http import ClientGone, Receive, Scope, Send, read_body, send_whole

WITHIN_S = 30.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        body = await read_body(scope, receive, 1 << 20)
    except ClientGone:
        return
    await send_whole(send, body or b"{}")


@contextmanager
def serving(clients: Clients) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        echo, http=clients.protocol(), ws="none", lifespan="off", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        watching = asyncio.create_task(clients.watch())
        await server.serve(sockets=[listening])
        watching.cancel()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(WITHIN_S)


@contextmanager
def connected(port: int, count: int = 1) -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    try:
        while len(found) < count:
            found.append(socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S))
        yield found
    finally:
        for one in found:
            one.close()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes; empty for a connection that was broken off."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def ask(port: int, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    with connected(port) as (connection,):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)
        head_bytes, _, rest = read_all(connection).partition(b"\r\n\r\n")
    lines = head_bytes.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, rest


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_beyond_the_bound_only_its_state_is_told() -> None:
    clients = Clients(8, 4, 1 << 20)
    with serving(clients) as port, connected(port, 8) as idle:
        until(lambda: clients.open == 8)
        status, headers, body = ask(port, "/v1/completions")
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        error = json.loads(body)["error"]
        assert error["code"] == "too_many_connections"
        assert "9 connections are open, the bound is 8" in error["message"]
        assert ask(port, "/_/health")[0] == 200
        idle[0].sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok")
        assert idle[0].recv(100).startswith(b"HTTP/1.1 200 ")
        idle[1].close()
        until(lambda: clients.open == 7)
        assert ask(port, "/v1/completions")[0] == 200
        assert clients.turned_away == 1


def test_a_flood_that_says_nothing_does_not_keep_a_probe_out() -> None:
    clients = Clients(4, 4, 1 << 20)
    with serving(clients) as port, connected(port, 40):
        until(lambda: clients.open >= 8)
        assert ask(port, "/_/ready")[0] == 200
        assert clients.open <= 8


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"POST / HTTP/1.1\r\nho", "request_timeout"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc", "request_timeout"),
    ],
)
def test_who_stops_in_the_middle_is_told_and_let_go(sent: bytes, code: str) -> None:
    clients = Clients(8, 4, 1 << 20, head_s=0.4, stall_s=0.4)
    with serving(clients) as port, connected(port) as (connection,):
        connection.sendall(sent)
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
        until(lambda: clients.open == 0 and not clients.all and clients.coming_bytes == 0)


def test_who_drips_a_body_is_let_go_when_it_should_have_been_there() -> None:
    clients = Clients(8, 4, 1 << 20, stall_s=20.0, head_s=0.4, body_s=1.0)
    with serving(clients) as port, connected(port) as (connection,):
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")

        def drips() -> bool:
            try:
                connection.sendall(b"x")
            except OSError:
                return True
            return clients.open == 0

        until(drips)


def test_who_says_nothing_is_let_go() -> None:
    clients = Clients(8, 4, 1 << 20, head_s=0.4)
    with serving(clients) as port, connected(port) as (connection,):
        assert read_all(connection) == b""


def test_bodies_that_are_coming_are_bounded_together() -> None:
    clients = Clients(64, 4, 100_000)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n"
    with serving(clients) as port, connected(port, 2) as (first, second):
        first.sendall(head + b"x" * 59_999)
        until(lambda: clients.coming_bytes == 59_999)
        second.sendall(head + b"x" * 59_999)
        answer = read_all(second)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        first.sendall(b"x")
        assert first.recv(100).startswith(b"HTTP/1.1 200 ")
        until(lambda: clients.coming_bytes == 0)

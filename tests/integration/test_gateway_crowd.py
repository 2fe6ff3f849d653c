"""More clients than the gateway takes: they are told so, and it still says that it is well."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from keystage.gateway.incoming import Receive
from keystage.gateway.proxy import Scope, Send
from keystage.gateway.server import client_crowd, client_protocol

WITHIN_S = 30.0
HANDSHAKE = (
    b"GET /function/f HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), WITHIN_S)
    finally:
        writer.close()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()


async def serve_and_try() -> None:
    crowd = client_crowd(4, 2)
    config = uvicorn.Config(
        app,
        http=client_protocol(20.0, crowd=crowd),
        ws="websockets-sansio",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    try:
        async with asyncio.timeout(WITHIN_S):
            while crowd.open < 4:
                await asyncio.sleep(0.01)
        for request in (get("/function/f"), get("/system/functions"), HANDSHAKE):
            answer = await exchange(port, request)
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"retry-after: 1" in answer
            assert b"5 connections are open, the bound is 4" in answer
        for path in ("/healthz", "/_/ready"):
            assert (await exchange(port, get(path))).startswith(b"HTTP/1.1 200 ")
        reader, writer = idle[0]
        writer.write(get("/function/f"))
        assert (await asyncio.wait_for(reader.read(100), WITHIN_S)).startswith(b"HTTP/1.1 200 ")
    finally:
        for _, writer in idle:
            writer.close()
    async with asyncio.timeout(WITHIN_S):
        while crowd.open:
            await asyncio.sleep(0.01)
    server.should_exit = True
    await serving


def test_beyond_the_bound_clients_are_told_and_health_is_answered() -> None:
    asyncio.run(serve_and_try())

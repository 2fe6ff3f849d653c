"""What stands beside the gateway in `bench gateway`: a naive proxy, and the gateway's server alone.

The naive proxy is what one writes first: a FastAPI route that reads the request, asks with aiohttp
and answers with what it read. The bare application shows what of the gateway is its HTTP server: it
takes a body and answers as many bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response

from keystage.gateway.server import ClientProtocol, settle_memory

Messages = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@contextlib.contextmanager
def naive_proxy(address: str) -> Iterator[tuple[str, int]]:
    """FastAPI and aiohttp in front of `host:port`, in a process of its own; yields URL and pid."""
    with _process(_serve_naive, address) as found:
        yield found


@contextlib.contextmanager
def bare_server(answer_bytes: int) -> Iterator[tuple[str, int]]:
    """The gateway's server without a gateway, in a process of its own; yields URL and pid."""
    with _process(_serve_bare, answer_bytes) as found:
        yield found


@contextlib.contextmanager
def _process(target: Callable[[socket.socket, Any], None], argument: object) -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(listening, argument), daemon=True
    )
    process.start()
    listening.close()
    assert process.pid is not None
    try:
        yield f"http://127.0.0.1:{port}/function/bench", process.pid
    finally:
        process.terminate()
        process.join(5)


def _serve_naive(listening: socket.socket, address: str) -> None:
    app = FastAPI()
    sessions: list[aiohttp.ClientSession] = []

    @app.post("/function/{name}")
    async def pass_on(request: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession())
        body = await request.body()
        headers = {key: value for key, value in request.headers.items() if key != "host"}
        async with sessions[0].post(f"http://{address}/", data=body, headers=headers) as answer:
            content = await answer.read()
            return Response(content, answer.status, media_type=answer.headers.get("content-type"))

    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


def _serve_bare(listening: socket.socket, answer_bytes: int) -> None:
    content = b"y" * answer_bytes
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % answer_bytes)]

    async def app(scope: dict[str, Any], receive: Messages, send: Send) -> None:
        assert scope["type"] == "http"
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=ClientProtocol,
        lifespan="off",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    settle_memory()
    uvicorn.Server(config).run(sockets=[listening])

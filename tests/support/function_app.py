"""A small real function: an ASGI program with the behaviours that gateway tests need.

Run as `python -m uvicorn --app-dir tests/support function_app:app --port $PORT`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import websocket_app

EVENTS: list[str] = []


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Routes by path."""
    path = scope.get("path", "")
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "websocket":
        await websocket_app.app(scope, receive, send)
    elif path == "/stream":
        await _stream(receive, send)
    elif path == "/slow":
        query = dict(pair.split("=") for pair in scope["query_string"].decode().split("&") if pair)
        await asyncio.sleep(float(query.get("s", "0.2")))
        await _answer(send, os.environ["KEYSTAGE_REPLICA"].encode())
    elif path == "/forever":
        EVENTS.append("begun")
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            EVENTS.append("disconnected")
    elif path == "/events":
        await _answer(send, json.dumps(EVENTS).encode())
    elif path in ("/die", "/half"):
        if path == "/half":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    elif path == "/status/418":
        await _answer(send, b"short and stout", 418)
    else:
        await _echo(scope, receive, send)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _answer(send: Any, body: bytes, status: int = 200, headers: Any = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def _stream(receive: Any, send: Any) -> None:
    """Sends one chunk, and the next one only for each chunk of the request's body."""
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    await send({"type": "http.response.body", "body": b"data: begin\n\n", "more_body": True})
    while True:
        message = await receive()
        if message.get("body"):
            body = b"data: " + message["body"] + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if not message.get("more_body"):
            break
    await send({"type": "http.response.body", "body": b"data: end\n\n"})


async def _echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    told = {
        "method": scope["method"],
        "path": scope["raw_path"].decode(),
        "query": scope["query_string"].decode(),
        "headers": [[k.decode(), v.decode("latin-1")] for k, v in scope["headers"]],
        "size": len(body),
        "body": body[:200].decode("latin-1"),
        "replica": os.environ["KEYSTAGE_REPLICA"],
    }
    headers = [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"connection", b"x-secret-hop"),
        (b"x-secret-hop", b"1"),
    ]
    await _answer(send, json.dumps(told).encode(), 200, headers)

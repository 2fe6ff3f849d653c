"""The WebSocket behaviours of `function_app`, by path."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

EVENTS: list[Any] = []
FLOOD = 3000
"""Messages of 64 KiB: twice what the buffers of two connections hold where systems let them grow."""


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Routes by path; `/ws/echo` and every other path echo."""
    path = scope["path"]
    await receive()
    if path == "/ws/refuse":
        headers = [(b"content-type", b"text/x-no"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        await send({"type": "websocket.http.response.start", "status": 402, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": b"pay first"})
        return
    if path == "/ws/moved":
        headers = [(b"location", b"/ws/echo")]
        await send({"type": "websocket.http.response.start", "status": 307, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": b""})
        return
    if path == "/ws/dead-before":
        os.kill(os.getpid(), signal.SIGKILL)
    if path == "/ws/slow":
        await asyncio.sleep(60)
    offered = scope["subprotocols"]
    await send(
        {
            "type": "websocket.accept",
            "subprotocol": offered[-1] if offered else None,
            "headers": [(b"x-mine", b"1"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")],
        }
    )
    if path == "/ws/told":
        told = {
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": [[k.decode(), v.decode("latin-1")] for k, v in scope["headers"]],
            "replica": os.environ["KEYSTAGE_REPLICA"],
        }
        await send({"type": "websocket.send", "text": json.dumps(told)})
    elif path == "/ws/close":
        await receive()
        await send({"type": "websocket.close", "code": 4321, "reason": "enough"})
        return
    elif path == "/ws/die":
        await receive()
        os.kill(os.getpid(), signal.SIGKILL)
    elif path == "/ws/deaf":
        await asyncio.sleep(60)
    elif path == "/ws/flood":
        await _flood(send)
        return
    elif path == "/ws/events":
        await send({"type": "websocket.send", "text": json.dumps(EVENTS)})
    await _echo(receive, send)


async def _flood(send: Any) -> None:
    EVENTS.append(0)
    for number in range(FLOOD):
        await send({"type": "websocket.send", "bytes": number.to_bytes(4, "big") * (1 << 14)})
        EVENTS[-1] = number + 1
    await send({"type": "websocket.close", "code": 1000})


async def _echo(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            EVENTS.append([message["code"], message.get("reason")])
            return
        await send({"type": "websocket.send", "bytes": message.get("bytes"), "text": message.get("text")})

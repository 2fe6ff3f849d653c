"""A function that writes down every call it runs: one line with the call's id, in the file `RAN` names.

Run as `python -m uvicorn --app-dir tests/support async_function:app --port $PORT`. Paths: `/status/N`
answers with that status, `/slow?s=N` takes N seconds, others echo the body.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

RAN = os.open(os.environ["RAN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT) if "RAN" in os.environ else -1


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Routes by path."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = dict(scope["headers"])
    if b"x-call-id" in headers:  # else it is asked whether it is ready
        # One write to a file opened for appending is whole, whoever is killed.
        os.write(RAN, headers[b"x-call-id"] + b"\n")
    path, status = scope["path"], 200
    if path == "/slow":
        await asyncio.sleep(float(scope["query_string"].decode().removeprefix("s=")))
    elif path.startswith("/status/"):
        status = int(path.removeprefix("/status/"))
    told = b"|".join([body, scope["raw_path"], scope["query_string"], headers.get(b"x-thing", b"")])
    answer = [(b"content-type", b"text/x-told")]
    await send({"type": "http.response.start", "status": status, "headers": answer})
    await send({"type": "http.response.body", "body": told})

"""Serves `handle(event)` of function/handler.py over HTTP.

`PORT` (8080) and `HOST` say where. `/_/health` answers while the process works, `/_/ready` while it
takes requests. SIGTERM drains: for `LINGER_S` seconds requests are still taken while `/_/ready`
says 503, so that whoever routes here can look away first; then those in hand are finished, and the
process ends with 0. Everything else goes to the handler; what it returns is sent as it comes.
"""

import asyncio
import collections.abc
import concurrent.futures
import inspect
import json
import logging
import os
import signal
import sys
import urllib.parse
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).parent / "function"))
from handler import handle

MAX_BODY_BYTES = int(os.environ.get("MAX_BODY_BYTES", 64 << 20))
LINGER_S = float(os.environ.get("LINGER_S", 0))
THREADS = int(os.environ.get("THREADS", 64))
log = logging.getLogger("function")


class Event:
    """One request."""

    def __init__(self, scope, body):
        self.method = scope["method"]
        self.path = scope["path"]
        query = scope["query_string"].decode("latin-1")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.body = body

    def text(self):
        """The body as UTF-8 text."""
        return self.body.decode("utf-8")

    def json(self):
        """The body as JSON."""
        return json.loads(self.body)

    @staticmethod
    def secret(name):
        """A secret that the function was deployed with."""
        folder = Path(os.environ.get("secret_mount_path", "/var/openfaas/secrets"))  # noqa: SIM112
        return (folder / Path(name).name).read_text(encoding="utf-8")


class App:
    """The ASGI program."""

    def __init__(self):
        self.is_draining = False
        self.server = None

    async def __call__(self, scope, receive, send):
        """Serves one request, or the program's own start and end."""
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
        elif scope["path"] == "/_/health":
            await Answer(receive, send).give("ok\n")
        elif scope["path"] == "/_/ready":
            await Answer(receive, send).give(*(("draining\n", 503) if self.is_draining else ("ok\n",)))
        else:
            await serve(scope, receive, send)

    async def live(self, receive, send):
        """Takes SIGTERM over once the server runs; plain handlers get their threads."""
        loop = asyncio.get_running_loop()
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(THREADS))
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self.drain)
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return

    def drain(self):
        """No longer ready; ends when those who route here have had the time to see it."""
        if not self.is_draining:
            self.is_draining = True
            asyncio.get_running_loop().call_later(LINGER_S, self.end)

    def end(self):
        """Takes no new request; running ones are finished."""
        self.server.should_exit = True


class Answer:
    """What is sent back; `begun` once the client has got some of it."""

    def __init__(self, receive, send):
        self.receive = receive
        self.send = send
        self.begun = False

    async def give(self, body, status=200, headers=None):
        """Sends a whole body, or the pieces of a generator as they come."""
        headers = {str(name).lower(): str(value) for name, value in (headers or {}).items()}
        pieces = as_pieces(body)
        if pieces is None:
            data, kind = as_bytes(body)
            headers = {"content-type": kind, "content-length": str(len(data)), **headers}
            await self.begin(status, headers)
            await self.send({"type": "http.response.body", "body": data})
            return
        gone = asyncio.create_task(self.receive())  # done when the client has left
        try:
            async for piece in pieces:
                if not self.begun:
                    await self.begin(status, {"content-type": "text/plain; charset=utf-8", **headers})
                if gone.done():
                    return
                data = as_bytes(piece)[0]
                await self.send({"type": "http.response.body", "body": data, "more_body": True})
            if not self.begun:
                await self.begin(status, headers)
            await self.send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await pieces.aclose()

    async def begin(self, status, headers):
        """Sends status and headers."""
        self.begun = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})


async def serve(scope, receive, send):
    """Calls the handler and sends what it returns."""
    answer = Answer(receive, send)
    try:
        body = await read(receive)
    except ConnectionError:
        return
    if body is None:
        await answer.give(f"the body is larger than {MAX_BODY_BYTES} bytes\n", 413)
        return
    try:
        result = await call(Event(scope, body))
        await answer.give(*(result if isinstance(result, tuple) else (result,)))
    except Exception:  # whatever the handler raises is its own failure, not the server's
        if answer.begun:
            raise  # the connection is cut, so that the client sees that the answer is not whole
        log.exception("%s %s failed", scope["method"], scope["path"])
        await answer.give("the handler failed: see the function's logs\n", 500)


async def call(event):
    """The handler's result; a plain function runs in a thread."""
    if inspect.iscoroutinefunction(handle):
        return await handle(event)
    return await asyncio.to_thread(handle, event)


async def read(receive):
    """The request's whole body, None if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left before its body was here")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


def as_bytes(value):
    """(bytes, content type) of a body or a piece of one."""
    if value is None:
        return b"", "text/plain; charset=utf-8"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), "application/octet-stream"
    if isinstance(value, str):
        return value.encode("utf-8"), "text/plain; charset=utf-8"
    return json.dumps(value).encode("utf-8"), "application/json"


def as_pieces(body):
    """An asynchronous generator over a generator's pieces, None for anything else."""
    if inspect.isasyncgen(body):
        return body
    return in_thread(body) if isinstance(body, collections.abc.Iterator) else None


async def in_thread(pieces):
    """The pieces of a plain iterator; each is waited for in a thread."""
    end = object()
    try:
        while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
            yield piece
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            await asyncio.to_thread(close)


def main():
    """Serves until SIGTERM."""
    sys.stdout.reconfigure(line_buffering=True)  # what the handler prints is logged at once
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = App()
    app.server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=os.environ.get("HOST", "127.0.0.1"),
            port=int(os.environ.get("PORT", 8080)),
            lifespan="on",
            log_config=None,
            log_level="warning",
            timeout_keep_alive=120,  # longer than gateways keep idle connections: they close them
            access_log=False,
        )
    )
    app.server.run()


if __name__ == "__main__":
    main()

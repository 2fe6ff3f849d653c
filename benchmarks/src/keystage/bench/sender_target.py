"""What `bench sender` sends to: a server that costs as little as Python can, and notes when requests come.

A process of its own, the same for all that are compared; httptools on uvloop. `GET /came` hands out the
times at which requests came since it was last asked, and is none of them itself.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import http.client
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import urlsplit

import httptools
import numpy as np
import uvloop

from keystage.wire.descriptors import raise_descriptors

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"
CAME = "/came"


@contextlib.contextmanager
def running(serve: Callable[[socket.socket], None] | None = None) -> Iterator[str]:
    """Starts a server in a process of its own and yields its address.

    Args:
        serve: serves on a socket that listens, until the process is ended; None: this module's.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    target = serve or _serve
    process = multiprocessing.get_context("spawn").Process(target=target, args=(listening,), daemon=True)
    process.start()
    listening.close()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(5)


def came(address: str) -> np.ndarray:
    """`time.monotonic()` of every request since the last time this was asked, float64, ascending."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request("GET", CAME)
        return np.frombuffer(connection.getresponse().read(), np.float64)
    finally:
        connection.close()


def _serve(listening: socket.socket) -> None:
    raise_descriptors()
    uvloop.run(_listen(listening))


async def _listen(listening: socket.socket) -> None:
    times_s = array.array("d")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(times_s), sock=listening, backlog=4096)
    gc.freeze()
    gc.disable()
    await server.serve_forever()


class _Connection(asyncio.Protocol):
    __slots__ = ("_is_asking", "_parser", "_times_s", "_transport")

    def __init__(self, times_s: array.array[float]) -> None:
        self._times_s = times_s
        self._is_asking = False
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._is_asking = url == CAME.encode()

    def on_message_complete(self) -> None:
        if not self._is_asking:
            self._times_s.append(time.monotonic())
            self._transport.write(_OK)
            return
        content = self._times_s.tobytes()
        del self._times_s[:]
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content)
        self._transport.write(head + content)
        self._transport.close()

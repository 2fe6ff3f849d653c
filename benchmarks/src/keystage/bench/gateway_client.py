"""The load of `bench gateway`: as little client as can be, so that it keeps a proxy busy.

A closed loop over kept connections, each with one fixed request in flight; httptools finds where
answers end. Runs in a process of its own. It must not look at what it is sent beyond the status and
size.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

FINISH_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """What one phase saw.

    Attributes:
        requests: answered with 200 and a body of the right size.
        failed: answered otherwise, or broken off.
        elapsed_s: measured time.
        latencies_s: of the good ones.
    """

    requests: int
    failed: int
    elapsed_s: float
    latencies_s: list[float]


def load(url: str, body_bytes: int, answer_bytes: int, concurrency: int, duration_s: float) -> LoadReport:
    """Keeps `concurrency` requests in flight for a time.

    Args:
        url: where to POST.
        body_bytes: size of each request's body.
        answer_bytes: size that an answer's body must have.
        concurrency: connections.
        duration_s: seconds; requests begun within it are finished.
    """
    return uvloop.run(_load(url, body_bytes, answer_bytes, concurrency, duration_s))


async def _load(
    url: str, body_bytes: int, answer_bytes: int, concurrency: int, duration_s: float
) -> LoadReport:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n"
    )
    request = head.encode() + b"x" * body_bytes
    host, port = parts.hostname, parts.port
    assert host is not None, url
    assert port is not None, url
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    end_s = began_s + duration_s
    lanes = []
    for _ in range(concurrency):
        _, lane = await loop.create_connection(lambda: _Lane(request, answer_bytes, end_s), host, port)
        lanes.append(lane)
    async with asyncio.timeout(duration_s + FINISH_S):
        await asyncio.gather(*(lane.done for lane in lanes))
    elapsed_s = time.perf_counter() - began_s
    latencies_s = [latency for lane in lanes for latency in lane.latencies_s]
    return LoadReport(len(latencies_s), sum(lane.failed for lane in lanes), elapsed_s, latencies_s)


class _Lane(asyncio.Protocol):
    """One connection."""

    def __init__(self, request: bytes, answer_bytes: int, end_s: float) -> None:
        self.latencies_s: list[float] = []
        self.failed = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._answer_bytes = answer_bytes
        self._end_s = end_s
        self._parser = httptools.HttpResponseParser(self)
        self._size = 0
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.failed += 1
            self.done.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)

    def on_message_complete(self) -> None:
        now_s = time.perf_counter()
        if self._parser.get_status_code() == 200 and self._size == self._answer_bytes:
            self.latencies_s.append(now_s - self._sent_s)
        else:
            self.failed += 1
        if now_s < self._end_s:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def _send(self) -> None:
        self._size = 0
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

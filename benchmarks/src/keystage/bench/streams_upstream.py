"""The function that `bench streams` calls: one numbered, stamped chunk at a time, on a fixed schedule.

`python -m keystage.bench.streams_upstream PORT`. As light as it can be, so that it does not blur what
the gateway costs. A chunk that falls due while the connection takes no more waits; none is left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import time
import urllib.parse
from typing import cast

import httptools
import uvloop

from keystage.wire.descriptors import raise_descriptors

STAMP_BYTES = 32
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_END = b"0\r\n\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What a stream sends.

    Attributes:
        count: chunks.
        every_s: seconds between two.
        size_bytes: of each, at least `STAMP_BYTES`.
    """

    count: int
    every_s: float
    size_bytes: int

    @property
    def target(self) -> str:
        """Path and query that ask for it."""
        return f"/?count={self.count}&every_s={self.every_s:g}&size_bytes={self.size_bytes}"


def chunk(number: int, at_ns: int, size_bytes: int) -> bytes:
    """One chunk: its number, when it was sent (`time.monotonic_ns`, one clock for the machine), padding."""
    return (b"%010d %020d\n" % (number, at_ns)).ljust(size_bytes, b".")


def stamp(data: bytes | bytearray) -> tuple[int, int]:
    """Number and time of a chunk.

    Raises:
        ValueError: it has none: bytes were lost or mixed.
    """
    return int(data[:10]), int(data[11:31])


def allow_connections(needed: int) -> None:
    """Raises this process's bound of descriptors as far as it may.

    Raises:
        OSError: that is not far enough.
    """
    most = raise_descriptors()
    if most < needed:
        raise OSError(f"{needed} descriptors are needed, RLIMIT_NOFILE allows {most}")


class _Answer(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._schedule = Schedule(0, 0.0, 0)
        self._number = 0
        self._began_s = 0.0
        self._is_blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        fields = dict(urllib.parse.parse_qsl((httptools.parse_url(url).query or b"").decode()))
        self._schedule = Schedule(
            int(fields.get("count", 0)), float(fields.get("every_s", 0)), int(fields.get("size_bytes", 0))
        )

    def on_message_complete(self) -> None:
        assert self._transport is not None, "data comes from a transport"
        if not self._schedule.count:  # a probe
            self._transport.write(_EMPTY)
            return
        self._transport.write(_HEAD)
        self._number = 0
        self._began_s = self._loop.time()
        self._send()

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False
        if self._timer is None and self._number < self._schedule.count:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def _send(self) -> None:
        self._timer = None
        if self._is_blocked or self._transport is None:
            return
        size_bytes = self._schedule.size_bytes
        body = chunk(self._number, time.monotonic_ns(), size_bytes)
        self._number += 1
        is_last = self._number == self._schedule.count
        self._transport.write(b"%x\r\n%b\r\n%b" % (size_bytes, body, _END if is_last else b""))
        if not is_last:
            at_s = self._began_s + self._number * self._schedule.every_s
            self._timer = self._loop.call_at(at_s, self._send)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """Serves until it is ended."""
    allow_connections(0)
    gc.disable()  # a collection would be seen as latency
    uvloop.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()

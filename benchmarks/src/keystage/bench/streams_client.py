"""The client of `bench streams`: thousands of streams in one process of its own, each chunk checked.

Some may read nothing at first (slow clients). Every chunk has a number and the time at which it was
sent, so a lost, doubled or reordered one is seen, and latencies need no second clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import socket
import time
from typing import cast

import httptools
import numpy as np
import uvloop

from keystage.bench.streams_upstream import STAMP_BYTES, Schedule, allow_connections, stamp

SLOW_RECEIVE_BYTES = 1 << 15
"""Receive buffer of slow clients, so that theirs is not what hides what the gateway does."""
SPARE_DESCRIPTORS = 100
LATE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Streams that are alike.

    Attributes:
        name: for the report.
        address: host and port.
        prefix: of the path, `/function/NAME` through a gateway.
        streams: how many.
        schedule: what each sends.
        silent_s: seconds for which a client reads nothing after its request, 0 for fast ones.
    """

    name: str
    address: tuple[str, int]
    prefix: str
    streams: int
    schedule: Schedule
    silent_s: float = 0.0


@dataclasses.dataclass(slots=True)
class GroupReport:
    """What a group's clients saw.

    Attributes:
        latencies_s: from sent to received, one a chunk.
        chunks: received.
        missing: chunks that should have come and did not.
        misplaced: chunks that came in another place than theirs.
        failed: streams that did not end as they should, with why.
    """

    latencies_s: np.ndarray
    chunks: int
    missing: int
    misplaced: int
    failed: list[str]


def run(groups: list[Group], ramp_s: float) -> dict[str, GroupReport]:
    """Opens every stream, reads all to their ends, and reports by name of group.

    Args:
        groups: all at once.
        ramp_s: seconds over which the streams are opened, evenly mixed.

    Raises:
        OSError: this process may not have so many connections.
    """
    allow_connections(sum(group.streams for group in groups) + SPARE_DESCRIPTORS)
    gc.disable()  # a collection would be seen as latency
    return uvloop.run(_run(groups, ramp_s))


async def _run(groups: list[Group], ramp_s: float) -> dict[str, GroupReport]:
    loop = asyncio.get_running_loop()
    turns = [(k / group.streams, group) for group in groups for k in range(group.streams)]
    turns.sort(key=lambda turn: turn[0])
    began_s = loop.time()
    opening = []
    streams: list[_Stream] = []
    for share, group in turns:
        await asyncio.sleep(max(0.0, began_s + share * ramp_s - loop.time()))
        stream = _Stream(group)
        streams.append(stream)
        opening.append(loop.create_task(_open(stream)))
    longest_s = max(group.schedule.count * group.schedule.every_s + group.silent_s for group in groups)
    await asyncio.wait([stream.ended for stream in streams], timeout=longest_s + LATE_S)
    await asyncio.gather(*opening)
    for stream in streams:
        stream.stop()
    return {group.name: _report(group, [s for s in streams if s.group is group]) for group in groups}


async def _open(stream: _Stream) -> None:
    sock = socket.socket()
    try:
        if stream.group.silent_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BYTES)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, stream.group.address)
        await loop.create_connection(lambda: stream, sock=sock)
        stream.begin()
    except OSError as error:
        sock.close()
        stream.end(f"not connected: {error}")


def _report(group: Group, streams: list[_Stream]) -> GroupReport:
    return GroupReport(
        latencies_s=np.concatenate([np.array(s.latencies_ns, np.int64) for s in streams]) / 1e9,
        chunks=sum(s.received for s in streams),
        missing=sum(max(0, group.schedule.count - s.received) for s in streams),
        misplaced=sum(s.misplaced for s in streams),
        failed=[s.trouble for s in streams if s.trouble],
    )


class _Stream(asyncio.Protocol):
    """One stream; `ended` is done when it is, `trouble` says why it ended badly."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latencies_ns: list[int] = []
        self.received = 0
        self.misplaced = 0
        self.trouble = "not ended in time"
        self._size_bytes = group.schedule.size_bytes
        self._held = bytearray()
        self._now_ns = 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def end(self, trouble: str) -> None:
        if not self.ended.done():
            self.trouble = trouble
            self.ended.set_result(None)

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def begin(self) -> None:
        """Asks; later than `connection_made`, after which the loop would begin to read again."""
        if self._transport is None:
            return
        if self.group.silent_s:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self.group.silent_s, self._read_on)
        target = self.group.prefix + self.group.schedule.target
        self._transport.write(f"GET {target} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._now_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.end(f"no HTTP: {error}")
            self.stop()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.end(f"status {status}")

    def on_body(self, data: bytes) -> None:
        held = self._held
        held += data
        while len(held) >= self._size_bytes:
            try:
                number, at_ns = stamp(held[:STAMP_BYTES])
            except ValueError:
                self.misplaced += 1
                self.end(f"chunk {self.received} is torn")
                self.stop()
                return
            del held[: self._size_bytes]
            self.misplaced += number != self.received
            self.received += 1
            self.latencies_ns.append(self._now_ns - at_ns)

    def on_message_complete(self) -> None:
        self.end("" if not self._held else f"{len(self._held)} bytes too many")
        self.stop()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.end(f"broken off after {self.received} chunks: {error}")

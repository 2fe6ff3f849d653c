"""Kept connections to replicas, and the bytes of a request's head.

Between `gateway.proxy` (one exchange) and `gateway.upstream_connection` (one connection). It decides
when a connection is made, kept, given up for silence and closed; it must not retry: whether a
request may be sent again is the proxy's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from keystage.gateway.forever import forever
from keystage.gateway.upstream_answer import UpstreamError
from keystage.gateway.upstream_connection import Connection, UpstreamSilence

CONNECT_S = 5.0
IDLE_S = 3.0
"""Shorter than any server's keep-alive (uvicorn: 5 s), so that it is us who close idle connections."""
SWEEP_S = 0.5
SWEEPS = 10
"""In one span of silence, at least: the bound is met to within a tenth."""
JOINED_BYTES = 1 << 14
"""A body up to this goes into one write with its head; beyond, a copy costs more than a second write."""
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})


class NotConnected(UpstreamError):
    """No connection came about, so nothing was sent."""


class Unsendable(UpstreamError):
    """The request cannot be written as HTTP, to no replica."""


class Pool:
    """Connections to all replicas.

    Args:
        silence_s: seconds without a byte from or to a replica that is waited for.
        idle_s: seconds for which an unused connection is kept.
    """

    def __init__(self, silence_s: float, idle_s: float = IDLE_S) -> None:
        self._silence_s = silence_s
        self._sweep_s = min(SWEEP_S, silence_s / SWEEPS)
        self._idle_s = idle_s
        self._idle: dict[str, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._swept_at_s = 0.0

    async def start(self) -> None:
        """Begins to look after connections."""
        loop = asyncio.get_running_loop()
        self._swept_at_s = loop.time()
        self._sweeper = loop.create_task(
            forever(self._sweep_later, self._sweep_s, "looking after connections")
        )

    async def stop(self) -> None:
        """Closes every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.close()

    async def acquire(self, address: str) -> Connection:
        """A connection that is open and free; `release` follows, whatever happens.

        Args:
            address: `host:port`.

        Raises:
            NotConnected: the replica does not take connections.
        """
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_reusable:
                break
        else:
            connection = await self._connect(address)
        connection.quiet_s = 0.0
        self._busy.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Keeps a connection for the next exchange if it can have one, else closes it."""
        self._busy.discard(connection)
        if connection.is_reusable:
            connection.quiet_s = 0.0
            self._idle.setdefault(connection.address, []).append(connection)
        else:
            connection.close()

    async def _connect(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(address, self._forget), host.strip("[]"), int(port)
                )
        except TimeoutError as error:
            raise NotConnected(f"took no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            raise NotConnected(f"took no connection: {error}") from error
        return connection

    def _forget(self, connection: Connection) -> None:
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    async def _sweep_later(self) -> None:
        await asyncio.sleep(self._sweep_s)
        now_s = asyncio.get_running_loop().time()
        passed_s, self._swept_at_s = now_s - self._swept_at_s, now_s
        # A process that was stopped for a while has heard nothing, and may not blame replicas.
        self._sweep(min(passed_s, 2 * self._sweep_s))

    def _sweep(self, passed_s: float) -> None:
        for connection in list(self._busy):
            connection.quiet_s = connection.quiet_s + passed_s if connection.is_quiet() else 0.0
            if connection.quiet_s >= self._silence_s:
                connection.fail(UpstreamSilence(f"sent nothing for {self._silence_s:g} s"))
        for address, idle in list(self._idle.items()):
            if not idle:
                del self._idle[address]
            for connection in idle:
                connection.quiet_s += passed_s
                if connection.quiet_s >= self._idle_s:
                    connection.close()


def send_whole(connection: Connection, method: str, head: bytes, body: bytes) -> None:
    """Begins an exchange whose request is all here."""
    if len(body) <= JOINED_BYTES:
        connection.begin(method, head + body, is_whole=True)
    else:
        connection.begin(method, head, is_whole=True)
        connection.write(body)


def request_head(
    method: str, target: bytes, address: str, headers: Iterable[tuple[bytes, bytes]], body_bytes: int | None
) -> bytes:
    """Request line and header fields.

    Args:
        method: as the client sent it.
        target: path and query, encoded.
        address: for the Host field.
        headers: the rest, without Host; a Content-Length among them is replaced.
        body_bytes: length of the body, None for a chunked one.

    Raises:
        Unsendable: a field would break the framing; parsers let none pass that does.
    """
    lines = [b"%b %b HTTP/1.1" % (method.encode("latin-1"), target), b"host: " + address.encode("latin-1")]
    lines += [b"%b: %b" % pair for pair in headers if pair[0] != b"content-length"]
    if body_bytes is None:
        lines.append(b"transfer-encoding: chunked")
    elif body_bytes or method not in _BODILESS:
        lines.append(b"content-length: %d" % body_bytes)
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or target.count(b" "):
        raise Unsendable("was not asked: a header field or the path contains a line break")
    return head + b"\r\n\r\n"

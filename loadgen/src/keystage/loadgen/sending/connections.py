"""The connections to one peer: kept ones are used again, and as many are made as requests need.

Comes after `client`, before `http1` and `http2`. The one used last is used first, so that a calm spell
leaves few connections, warm. HTTP/2 connections carry as many requests at once as the server allows.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from keystage.loadgen.sending.exchange import Exchange, Outcomes
from keystage.loadgen.sending.http1 import Http1Connection
from keystage.loadgen.sending.http2 import Http2Connection
from keystage.loadgen.sending.route import Peer, Version

KEEP_ALIVE_S = 3.0
"""Idle connections are closed earlier than servers close them (uvicorn: 5 s), so that few requests meet a
connection that is about to be closed."""

RESOLVED_FOR_S = 10.0
"""A name is looked up this often, as long as new connections are made."""

Connection = Http1Connection | Http2Connection


@functools.cache
def tls_context(http: Version) -> ssl.SSLContext:
    """How servers are checked: by the system's authorities, names included. Made once a process."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1" if http == "1.1" else "h2"])
    return context


class ProtocolRefused(Exception):
    """The server does not speak what was asked for; names what it does."""


class Connections:
    """All connections to one peer.

    Args:
        peer: where to.
        http: version of HTTP.
        outcomes: told how exchanges went.

    Attributes:
        opened: connections made so far.
    """

    def __init__(self, peer: Peer, http: Version, outcomes: Outcomes) -> None:
        self.opened = 0
        self._peer = peer
        self._http = http
        self._outcomes = outcomes
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._is_shared = http == "2"
        self._making_for: dict[Exchange, asyncio.Task[None]] = {}
        self._waiting: dict[Exchange, None] = {}
        self._looking_up: asyncio.Task[Sequence[Any]] | None = None
        self._looked_up_s = 0.0
        self._sweep = self._loop.call_later(KEEP_ALIVE_S / 3, self._close_idle)

    def carry(self, exchange: Exchange) -> None:
        """Sends on a kept connection, or on one that is made for it."""
        while self._idle:
            connection = self._idle[-1]
            is_carried = not connection.is_closing and connection.carry(exchange)
            if not (is_carried and isinstance(connection, Http2Connection) and connection.has_room):
                self._idle.pop().is_offered = False
            if is_carried:
                return
        exchange.carrier = self
        if self._is_shared and self._making_for:
            self._waiting[exchange] = None  # one connection carries many: wait for the one being made
        else:
            self._make(exchange)

    def drop(self, exchange: Exchange) -> None:
        """Gives up an exchange that waits for a connection, and the connection if it is for it alone."""
        self._waiting.pop(exchange, None)
        if (task := self._making_for.pop(exchange, None)) is not None:
            task.cancel()
            if self._waiting:  # on a making that is stuck: another may not be
                exchange = next(iter(self._waiting))
                del self._waiting[exchange]
                self._make(exchange)

    async def close(self) -> None:
        """Ends every connection and every making of one."""
        self._sweep.cancel()
        tasks = [*self._making_for.values(), *([self._looking_up] if self._looking_up else [])]
        for task in tasks:
            task.cancel()
        for connection in list(self._open):
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _free(self, connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        connection.is_offered = True
        self._idle.append(connection)

    def _gone(self, connection: Connection) -> None:
        self._open.discard(connection)  # the list of idle ones drops it when it meets it

    def _close_idle(self) -> None:
        """Closes what was idle for too long: the front of the list, for the back is used first."""
        before_s = time.monotonic() - KEEP_ALIVE_S
        kept: list[Connection] = []
        for connection in self._idle:
            if connection.is_closing:
                continue
            is_busy = isinstance(connection, Http2Connection) and connection.is_busy
            if connection.idle_since_s >= before_s or is_busy:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        self._sweep = self._loop.call_later(KEEP_ALIVE_S / 3, self._close_idle)

    def _make(self, exchange: Exchange) -> None:
        self._making_for[exchange] = self._loop.create_task(self._connect(exchange))

    async def _connect(self, exchange: Exchange) -> None:
        """Makes a connection and gives it its exchange; failures are the exchange's."""
        error = ""
        connection: Connection | None = None
        try:
            connection = await self._connected()
            if isinstance(connection, Http2Connection):
                error = await connection.ready
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        except (OSError, ValueError, ProtocolRefused) as failure:
            error = self._said(failure)
        self._making_for.pop(exchange, None)
        waiting, self._waiting = list(self._waiting), {}
        if connection is not None:
            self.opened += 1
            if not error and connection.is_closing:
                error = "disconnected: the server ended the connection as soon as it was made"
        if error or connection is None:
            for failed in (exchange, *waiting):
                self._outcomes.failed(failed, error)
            return
        self._open.add(connection)
        if not connection.is_offered:
            self._free(connection)
        for waited in (exchange, *waiting):
            if waited.carrier is self:  # else it has ended meanwhile
                self.carry(waited)

    def _said(self, failure: OSError | ValueError | ProtocolRefused) -> str:
        """Why there is no connection, as `class: detail`."""
        to = f"{self._peer.host}:{self._peer.port}"
        match failure:
            case ssl.SSLError() | ProtocolRefused():
                return f"tls: {to}: {failure}"
            case socket.gaierror():
                return f"dns: {self._peer.host}: {failure.strerror or failure}"
            case OSError():
                return f"connect: {to}: {failure.strerror or failure}"
            case _:  # what cannot be a name
                return f"dns: {self._peer.host}: {failure}"

    async def _connected(self) -> Connection:
        """Connects to the first of the peer's addresses that accepts."""
        context = tls_context(self._http) if self._peer.is_tls else None
        name = self._peer.host.rstrip(".") if self._peer.is_tls else None
        failure: OSError | None = None
        for address in await self._addresses():
            try:
                transport, connection = await self._loop.create_connection(
                    self._new, address[4][0], address[4][1], ssl=context, server_hostname=name
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = failure or error
                continue
            if self._peer.is_tls and self._http == "2":
                agreed = transport.get_extra_info("ssl_object").selected_alpn_protocol()
                if agreed != "h2":
                    transport.abort()
                    raise ProtocolRefused(
                        f"the server agreed to {agreed or 'no protocol'} by ALPN, not to h2"
                    )
            return connection
        assert failure is not None
        raise failure

    def _new(self) -> Connection:
        if self._is_shared:
            return Http2Connection(self._outcomes, self._free, self._gone)
        return Http1Connection(self._outcomes, self._free, self._gone)

    async def _addresses(self) -> Sequence[Any]:
        """The peer's addresses, looked up once for all who ask at a time."""
        now_s = time.monotonic()
        task = self._looking_up
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or failed or now_s - self._looked_up_s > RESOLVED_FOR_S:
            self._looked_up_s = now_s
            task = self._looking_up = self._loop.create_task(
                self._loop.getaddrinfo(self._peer.host, self._peer.port, type=socket.SOCK_STREAM)
            )
        return await asyncio.shield(task)

"""Sends requests and fills their rows: time-outs, retries where asked for, failures by class.

Comes after `pace`, before `connections`. It never waits: `send` hands a request over and returns. Every
request ends as a row, whatever network and server do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from keystage.loadgen.sending.connections import Connections
from keystage.loadgen.sending.exchange import Exchange
from keystage.loadgen.sending.route import Peer, Route, Version
from keystage.loadgen.sending.row import Progress, Row

RETRIED_STATUSES = (429, 502, 503, 504)
"""What a server answers that has not served the request and may serve it later."""

RETRIED_CLASSES = ("connect", "dns", "tls", "disconnected")
"""Failures before any answer that another attempt may not meet."""

RETRY_AFTER_S = 0.05
"""Wait before the first retry, doubled for each after it."""

MOST_MOVES = 8
"""As often may servers end kept connections under one request before it fails: none may loop for ever."""


class Client:
    """Sends requests over as many connections as needed.

    Args:
        routes: where requests may go.
        timeout_s: a request fails this long after it was handed over, all its attempts included.
        http: version of HTTP.
        retries: how often a request that failed is sent again.
        start_s: `time.monotonic()` of the start of the run.
        ended: called with each row that is filled.

    Attributes:
        moved: requests moved to another connection, uncounted, because no byte of them was processed.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        timeout_s: float,
        http: Version,
        retries: int,
        start_s: float,
        ended: Progress,
    ) -> None:
        self.start_s = start_s
        self.moved = 0
        self._timeout_s = timeout_s
        self._retries = retries
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._connections: Mapping[Peer, Connections] = {
            peer: Connections(peer, http, self) for peer in {route.peer for route in routes}
        }
        self._routes = routes
        self._in_flight: dict[Exchange, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch = self._loop.call_later(timeout_s, self._expire)

    @property
    def opened(self) -> int:
        """Connections made so far."""
        return sum(connections.opened for connections in self._connections.values())

    def send(self, row: Row, body: bytes) -> None:
        """Hands a request over now; its row is filled when it has ended."""
        row.sent_s = time.monotonic() - self.start_s
        route = self._routes[row.target]
        exchange = Exchange(row, body, route, row.sent_s + self._timeout_s)
        self._in_flight[exchange] = None
        self._connections[route.peer].carry(exchange)

    async def finish(self) -> None:
        """Returns when every request handed over has ended."""
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Ends all connections; what is in flight is not heard of again."""
        self._watch.cancel()
        for exchange in list(self._in_flight):
            self._end(exchange)
        for connections in self._connections.values():
            await connections.close()

    def answered(self, exchange: Exchange, now_s: float) -> None:
        """Fills the row of a whole answer, or tries again."""
        if exchange not in self._in_flight:
            return
        if exchange.answer.status in RETRIED_STATUSES and self._is_tried_again(exchange):
            return
        exchange.answer.complete(exchange.row, now_s)
        self._end(exchange)
        self._ended(exchange.row)

    def failed(self, exchange: Exchange, error: str, *, processed: bool = True) -> None:
        """Fills the row of a failure, or tries again; moves what cannot have been processed."""
        if exchange not in self._in_flight:
            return
        if not processed and exchange.moves < MOST_MOVES:
            exchange.moves += 1
            self.moved += 1
            exchange.begin_again()
            self._loop.call_soon(self._again, exchange)
            return
        kind = error.partition(":")[0]
        if kind in RETRIED_CLASSES and not exchange.answer.status and self._is_tried_again(exchange):
            return
        self._fail(exchange, error)

    def _is_tried_again(self, exchange: Exchange) -> bool:
        row = exchange.row
        if row.attempts > self._retries:
            return False
        wait_s = RETRY_AFTER_S * 2 ** (row.attempts - 1)
        if time.monotonic() - self.start_s + wait_s >= exchange.deadline_s:
            return False
        row.attempts += 1
        exchange.begin_again()
        self._loop.call_later(wait_s, self._again, exchange)
        return True

    def _again(self, exchange: Exchange) -> None:
        if exchange in self._in_flight:
            self._connections[exchange.route.peer].carry(exchange)

    def _fail(self, exchange: Exchange, error: str) -> None:
        exchange.answer.broken(exchange.row, time.monotonic() - self.start_s)
        exchange.row.error = error
        self._end(exchange)
        self._ended(exchange.row)

    def _end(self, exchange: Exchange) -> None:
        exchange.carrier = None
        del self._in_flight[exchange]
        if not self._in_flight:
            self._idle.set()

    def _expire(self) -> None:
        """Fails what is over its time. All have the same bound, so the oldest is always the first."""
        now_s = time.monotonic() - self.start_s
        next_s = now_s + self._timeout_s
        while (exchange := next(iter(self._in_flight), None)) is not None:
            if exchange.deadline_s > now_s:
                next_s = exchange.deadline_s
                break
            carrier = exchange.carrier
            self._fail(exchange, "timeout: no complete answer in time")
            if carrier is not None:
                carrier.drop(exchange)
        self._watch = self._loop.call_later(max(next_s - now_s, 0.001), self._expire)

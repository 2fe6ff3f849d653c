"""How many clients may be connected at once, and who is heard beyond that; for router and gateway.

A process that has no descriptor left accepts nobody: not its supervisor's probe either, and is taken for
dead with all that it serves. So connections are counted, and some places kept: who comes when `most` are open
is heard for one request, within seconds. Paths that say how the process is are answered; anything else gets
503 with Retry-After at once. If these places are taken too the oldest of them is broken off, so that a probe,
which asks as soon as it is connected, is answered in a flood of connections that say nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from keystage.wire.http_protocol import PassingProtocol

OVER_S = 5.0
"""For one that came when all places were taken."""
KEPT = 128
"""Descriptors kept for everything else, or an eighth of all if that is more."""
RETRY_S = 1
_OPEN = ("/_/health", "/_/ready", "/healthz")

_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Any]


def places(descriptors: int, each: int = 1) -> int:
    """How many connections a process may have open that may have so many descriptors.

    Args:
        descriptors: of the process.
        each: that a connection takes, those to others on its behalf included.
    """
    return max(1, (descriptors - max(KEPT, descriptors // 8)) // each)


class Crowd:
    """The connections of one server.

    Args:
        most: that may be open at once.
        reserve: more that are heard for one request, at least 1.
        content_type: of a refusal.
        body: of a refusal, from why.

    Attributes:
        open: connections now, those in the reserve included.
        turned_away: requests refused so far.
    """

    def __init__(self, most: int, reserve: int, content_type: bytes, body: Callable[[str], bytes]) -> None:
        self.most = most
        self.open = 0
        self.turned_away = 0
        self._reserve = reserve
        self._over: dict[CrowdedProtocol, None] = {}
        self._content_type = content_type
        self._body = body

    def enters(self, protocol: CrowdedProtocol) -> bool:
        """Counts a connection; whether it is one too many."""
        self.open += 1
        if self.open - len(self._over) <= self.most:
            return False
        if len(self._over) >= self._reserve:
            oldest = next(iter(self._over))
            oldest.transport.abort()
            self.leaves(oldest)
        self._over[protocol] = None
        return True

    def leaves(self, protocol: CrowdedProtocol) -> None:
        """It is closed; said twice of one that was broken off."""
        if protocol.is_counted:
            protocol.is_counted = False
            self.open -= 1
            self._over.pop(protocol, None)

    def why(self) -> str:
        """Why a request is not served."""
        return f"{self.open} connections are open, the bound is {self.most} (KEYSTAGE_MOST_CONNECTIONS)"

    def hearing(self, app: _App) -> _App:
        """The application for a connection too many."""

        async def heard(scope: _Message, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] in _OPEN:
                await app(scope, receive, send)
                return
            self.turned_away += 1
            body = self._body(self.why())
            headers = [
                (b"content-type", self._content_type),
                (b"content-length", b"%d" % len(body)),
                (b"retry-after", b"%d" % RETRY_S),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return heard


class CrowdedProtocol(PassingProtocol):
    """Uvicorn's protocol, counted.

    Attributes:
        crowd: where it is counted, None: nowhere.
        is_counted: whether it is.
        is_over: whether it is one too many.
    """

    crowd: Crowd | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_counted = False
        self.is_over = False
        self._over_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        if self.crowd is not None:
            self.is_counted = True
            self.is_over = self.crowd.enters(self)
        if self.is_over and self.crowd is not None:
            self.app = self.crowd.hearing(self.app)
            self._over_timer = self.loop.call_later(OVER_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        """A head is there; it is the only one of a connection too many."""
        super().on_headers_complete()
        if self.is_over and self.cycle is not None:
            self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._over_timer is not None:
            self._over_timer.cancel()
        if self.crowd is not None:
            self.crowd.leaves(self)
        super().connection_lost(exc)

"""The router's side of a client's connection: uvicorn's, bounded in number, in time and in bytes that come.

Under `face`, for `app`. Uvicorn bounds only the time between an answer and the next request. Here a head and
the parts of a body must come in time as well, and bodies that are still coming may not take more memory than
all that waits: who sends them slowly, or many at once, gets 408 or 503. The gateway has a timer for each
connection; here one timer looks at all of them, since few are late.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from keystage.router.engine import Refusal
from keystage.router.openai_errors import Crowded, SlowClient, error_body
from keystage.wire.crowd import Crowd, CrowdedProtocol

HEAD_S = 60.0
"""Long for any head, short enough that connections which send none do not pile up; as at the gateway."""
STALL_S = 60.0
"""Between two parts of a body."""
BODY_S = 600.0
"""For a whole body: no deadline is longer by default."""
LOOK_EVERY_S = 5.0


class Clients(Crowd):
    """All clients of the router.

    Args:
        most: connections at once.
        reserve: more that are heard for one request.
        body_bytes: of bodies that are still coming.
        head_s: seconds for a head.
        stall_s: seconds between parts of a body.
        body_s: seconds for a body.
    """

    def __init__(
        self,
        most: int,
        reserve: int,
        body_bytes: int,
        head_s: float = HEAD_S,
        stall_s: float = STALL_S,
        body_s: float = BODY_S,
    ) -> None:
        super().__init__(most, reserve, b"application/json", lambda why: error_body(Crowded(why)))
        self.body_bytes = body_bytes
        self.head_s, self.stall_s, self.body_s = head_s, stall_s, body_s
        self.coming_bytes = 0
        self.all: set[RouterProtocol] = set()

    async def watch(self) -> None:
        """Looks at all of them, for ever."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self.head_s / 4, self.stall_s / 4))
            now_s = asyncio.get_running_loop().time()
            for protocol in list(self.all):
                protocol.look(now_s)

    def protocol(self) -> type[RouterProtocol]:
        """The protocol of their connections."""
        return type("RouterClientProtocol", (RouterProtocol,), {"crowd": self, "clients": self})


class RouterProtocol(CrowdedProtocol):
    """One connection."""

    clients: Clients

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_from_s = math.inf
        """Since when a head is waited for; infinite: it is not."""
        self._body_from_s = math.inf
        self._heard_s = 0.0
        self._coming = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and owes a request."""
        super().connection_made(transport)
        self._heard_s = self._head_from_s = self.loop.time()
        self.clients.all.add(self)

    def data_received(self, data: bytes) -> None:
        """Part of a request came."""
        self._heard_s = self.loop.time()
        if math.isinf(self._head_from_s) and math.isinf(self._body_from_s):
            self._head_from_s = self._heard_s
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """A head is there, and its body follows."""
        self._head_from_s, self._body_from_s = math.inf, self._heard_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body is there."""
        self._coming += len(body)
        self.clients.coming_bytes += len(body)
        super().on_body(body)
        if self.clients.coming_bytes > self.clients.body_bytes:
            self._refuse(
                Crowded(
                    f"{self.clients.coming_bytes} bytes of bodies are coming, the bound is "
                    f"{self.clients.body_bytes}",
                    retry_after_s=1.0,
                )
            )

    def on_message_complete(self) -> None:
        """A request is there."""
        self._settle()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._settle()
        self.clients.all.discard(self)
        super().connection_lost(exc)

    def look(self, now_s: float) -> None:
        """Ends a connection whose client is late."""
        clients = self.clients
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not math.isinf(self._body_from_s):
            if self.flow.read_paused:
                self._heard_s = now_s  # it is we who do not read
            elif now_s - self._heard_s > clients.stall_s:
                self._refuse(SlowClient(f"no part of the body came for {clients.stall_s:g} s"))
            elif now_s - self._body_from_s > clients.body_s:
                self._refuse(SlowClient(f"the body was not there after {clients.body_s:g} s"))
        elif now_s - self._head_from_s > clients.head_s:
            if is_answering:
                self._head_from_s = now_s  # the next request; it is in no hurry
            elif self.unread_bytes:
                self._refuse(SlowClient(f"a request's head did not come within {clients.head_s:g} s"))
            else:
                self.transport.abort()

    def _settle(self) -> None:
        """Nothing of a body is coming any more."""
        self.clients.coming_bytes -= self._coming
        self._coming, self._body_from_s = 0, math.inf

    def _refuse(self, refusal: Refusal) -> None:
        """Ends the connection, with an answer where none has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        phrase = "Request Timeout" if refusal.status == 408 else "Service Unavailable"
        body = error_body(refusal)
        retry = b"retry-after: 1\r\n" if refusal.retry_after_s else b""
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%bconnection: close\r\n\r\n%b" % (refusal.status, phrase.encode(), len(body), retry, body)
        )
        self.transport.close()

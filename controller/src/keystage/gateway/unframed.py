"""Answers to HTTP/1.0 clients, which know no chunks: such an answer ends with its connection.

Between `gateway.server` and the applications it serves; uvicorn would send an HTTP/1.0 client the chunked
framing as if it were content. It must not know what is served.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Message = MutableMapping[str, Any]
_AT_ONCE = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Ends a connection so that half an answer does not look whole, as after an orderly end."""
    under = transport.get_extra_info("socket")
    if under is not None:
        under.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


class Unframed:
    """An ASGI application for one HTTP/1.0 request.

    Args:
        app: what answers.
        cycle: the server's side of the request.
    """

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._is_unframed = False

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[..., Awaitable[None]]
    ) -> None:
        """Serves it."""
        cycle = self._cycle

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message.get("headers", ())}
                self._is_unframed = b"content-length" not in named
                if self._is_unframed:
                    cycle.chunked_encoding = False
            elif self._is_unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_unframed)
        finally:
            if self._is_unframed and not cycle.response_complete:
                reset(cycle.transport)

"""The request's body and the client's presence, as the proxy needs them.

Wraps ASGI's `receive`: the body is passed on as it comes, counted against a bound, and once it is
complete a watcher notices when the client goes away, which cancels the work upstream. Used by
`gateway.proxy`; must not know replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from keystage.gateway.backend import TooLarge

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
WATCH_AFTER_S = 0.05
"""Most answers are there before it, and the watcher, a task to be cancelled, is never made: a tenth of
the gateway's processor time."""


class Incoming:
    """One request's body.

    Attributes:
        gone: the client went away.
        error: set when the body broke its bound.
    """

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self.gone = False
        self.error: TooLarge | None = None
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._size = 0
        self._more = True
        self._first = b""
        self._owner = asyncio.current_task()
        self._soon: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def begin(self, declared_bytes: int | None) -> bytes | AsyncIterator[bytes] | None:
        """Reads the first part.

        Args:
            declared_bytes: Content-Length, None without one.

        Returns:
            The whole body if it is here already (None if empty), else an iterator over it.

        Raises:
            TooLarge: it is, or is declared, larger than the bound.
        """
        if declared_bytes is not None and declared_bytes > self._limit_bytes:
            self._refuse(declared_bytes)
        self._first = await self._next()
        if self._more:
            return self._rest()
        return self._first or None

    def again(self) -> AsyncIterator[bytes]:
        """The body once more from its start; only while nothing of it was taken."""
        return self._rest()

    def close(self) -> None:
        """Ends the watch; called when the answer is complete."""
        self._owner = None
        if self._soon is not None:
            self._soon.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _rest(self) -> AsyncIterator[bytes]:
        yield self._first
        while self._more:
            chunk = await self._next()
            if chunk:
                yield chunk

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
            return b""
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        if self._size > self._limit_bytes:
            self._refuse(self._size)
        if not message.get("more_body", False):
            self._more = False
            self._soon = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin_watch)
        return chunk

    def _refuse(self, size: int) -> None:
        self.error = TooLarge(f"request body has {size} bytes or more, at most {self._limit_bytes} are taken")
        raise self.error

    def _begin_watch(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._more = False
        if self._owner is not None:
            self.gone = True
            self._owner.cancel()

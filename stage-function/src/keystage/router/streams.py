"""One client's side of a request: what the core delivered and the client has not taken yet."""

from __future__ import annotations

import asyncio

from keystage.router.engine import Refusal


class TokenStream:
    """A single-consumer queue that hands over everything that is there at once."""

    __slots__ = ("_done", "_pending", "_refusal", "_waiter")

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._done = False
        self._refusal: Refusal | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the core has ended the session."""
        return self._done

    def push(self, tokens: list[int], done: bool) -> None:
        """Adds tokens; `done` ends the stream after them."""
        self._pending.extend(tokens)
        self._done = self._done or done
        self._wake()

    def refuse(self, refusal: Refusal) -> None:
        """Ends the stream with an error, after what is pending."""
        self._refusal, self._done = refusal, True
        self._wake()

    async def take(self) -> list[int]:
        """All pending tokens, at least one; an empty list at the end.

        Raises:
            Refusal: the session ended without its answer.
        """
        while not self._pending and not self._done:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pending:
            taken, self._pending = self._pending, []
            return taken
        if self._refusal is not None:
            raise self._refusal
        return []

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""One connection to a replica: writes a request, feeds its answer, keeps both in step.

Made and kept by `gateway.upstream`, driven by `gateway.proxy`; `gateway.upstream_answer` says what
the bytes mean. One exchange at a time, never pipelined. Back-pressure both ways: reading pauses
while an answer waits here for the client, and `drain` waits while the socket takes no more. It must
not know functions or ASGI.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import cast

from keystage.gateway.upstream_answer import Answer, UpstreamBroken, UpstreamError

HELD_BYTES = 1 << 16
"""Of an answer, waiting for the client, beyond which reading pauses; one more read may come on top."""
RESCUE_BYTES = 1 << 16


class UpstreamSilence(UpstreamError):
    """The replica neither sent nor took a byte for too long."""


class Connection(asyncio.Protocol):
    """See the module.

    Args:
        address: the replica's `host:port`.
        lost: called once, when the connection is gone.

    Attributes:
        answer: to the request that was begun last.
        quiet_s: how long the replica has been waited for without a sign, kept by the pool.
    """

    def __init__(self, address: str, lost: Callable[[Connection], None]) -> None:
        self.address = address
        self.answer = Answer()
        self.quiet_s = 0.0
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None
        self._is_sent = True
        self._progress = False
        self._is_reading = True
        self._is_blocked = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._spare = -1

    # ------------------------------------------------------------ the proxy's side

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may follow: both messages ended, and the replica keeps it open."""
        return (
            self.answer.is_complete
            and self._is_sent
            and self.answer.keep_alive
            and self._error is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def begin(self, method: str, data: bytes, *, is_whole: bool) -> None:
        """Begins an exchange.

        Args:
            method: of the request.
            data: its head, and body as far as it is here.
            is_whole: nothing follows; else `write`, `drain` and `end` do.
        """
        assert self._transport is not None, "the pool hands out open connections only"
        self.answer.begin(is_head=method == "HEAD")
        self._is_sent = is_whole
        if not is_whole:
            with contextlib.suppress(OSError):  # out of descriptors: see `_rescue` for what it is without
                self._spare = os.dup(self._transport.get_extra_info("socket").fileno())
        self._transport.write(data)

    def write(self, data: bytes) -> None:
        """Sends a part of the body."""
        if self._transport is not None and not self._transport.is_closing():
            self._progress = True
            self._transport.write(data)

    async def drain(self) -> None:
        """Waits until the replica takes more.

        Raises:
            UpstreamError: it never will.
        """
        if self._is_blocked and self._error is None:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """The request is sent to its end."""
        self._is_sent = True
        if self._transport is not None and not self._transport.is_closing():
            self._close_spare()

    async def head(self) -> None:
        """Waits for the answer's status and headers.

        Raises:
            UpstreamError: it will not come.
        """
        while not self.answer.status:
            await self._wait()

    async def read(self) -> bytes:
        """The next part of the answer's body, as it came; empty only at its end.

        Raises:
            UpstreamError: the rest will not come.
        """
        answer = self.answer
        while not answer.chunks and not answer.is_complete:
            await self._wait()
        data = answer.take()
        if not self._is_reading and self._transport is not None:
            self._is_reading = True
            self._progress = True
            self._transport.resume_reading()
        return data

    def fail(self, error: Exception) -> None:
        """Ends the exchange with an error, and the connection."""
        if self._error is None:
            self._error = error
        self._wake()
        self.close()

    def close(self) -> None:
        """Ends the connection at once."""
        self._close_spare()
        if self._transport is not None:
            self._transport.abort()

    def is_quiet(self) -> bool:
        """Whether it waits for the replica and nothing has moved since this was asked last.

        A request whose body still comes from the client, or an answer that waits for the client to
        take it, is not waiting for the replica.
        """
        progress, self._progress = self._progress, False
        if progress:
            return False
        return self._writer is not None or (self._reader is not None and self._is_sent)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._error is not None and self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    # ------------------------------------------------------------ the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Takes a part of the answer."""
        answer = self.answer
        self._progress = True
        if answer.is_complete:
            answer.feed(data)  # nobody asked
            self.close()
            return
        try:
            answer.feed(data)
        except UpstreamBroken as error:
            self.fail(error)
            return
        if answer.held_bytes > HELD_BYTES and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()
        if answer.status:
            self._wake()

    def eof_received(self) -> None:
        """The replica sends no more; the transport closes after this."""
        self.answer.end()
        if self.answer.is_complete:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if error is not None and self._spare >= 0 and self._error is None:
            self._rescue()
        answer = self.answer
        answer.keep_alive = False
        if not answer.is_complete and self._error is None:
            when = "before its answer ended" if answer.status else "before it answered"
            self._error = UpstreamBroken(f"broke the connection {when}")
        if self._error is None:
            self._error = UpstreamBroken("has closed the connection")  # only an upload may still ask
        self._wake()
        self._close_spare()
        self._transport = None
        self._lost(self)

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """It does again."""
        self._is_blocked = False
        self._progress = True
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _rescue(self) -> None:
        """Reads an answer that a failed write would lose.

        A server that refuses a large body answers, and closes without reading the rest: what is sent
        after that fails, while the answer is still in the socket, here a duplicate of it.
        """
        with contextlib.suppress(OSError):
            while not self.answer.is_complete and self._error is None and self._spare >= 0:
                data = os.read(self._spare, RESCUE_BYTES)
                if not data:
                    self.answer.end()
                    return
                self.data_received(data)

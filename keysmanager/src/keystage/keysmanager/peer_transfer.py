"""Bytes of a segment or file into an HTTP connection, in threads.

`peer_server` has written the head of an answer; here its body goes out by `sendfile`, past Python and, for
a segment, without a copy on this side. It runs in a thread on a descriptor of its own: reading a file
may block on the disk, and asyncio's sendfile would block its loop there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

MAX_TRANSFERS = 32
"""Eight peers with four connections each; a thread mostly waits for the network."""

IDLE_S = 15.0
"""A receiver that takes no byte for this long is given up."""

_SEND_BYTES = 16 * 1024 * 1024
_BOUNCE_BYTES = 1024 * 1024
_POLL_S = 0.5


class TransferError(ConnectionError):
    """The body could not be sent as promised; the connection is of no more use."""


class Transfers:
    """Transfers that run; bounded, since each takes a thread."""

    def __init__(self, limit: int = MAX_TRANSFERS) -> None:
        self.limit = limit
        self._running = 0
        self._is_closing = threading.Event()
        self._pool = ThreadPoolExecutor(limit, "keystage-serve")

    def ticket(self) -> contextlib.AbstractContextManager[None] | None:
        """A place among the running transfers, None: all are taken. For the event loop's thread."""
        if self._running >= self.limit:
            return None
        self._running += 1
        return self._place()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._running -= 1

    async def send(self, request: web.Request, fd: int, offset: int, length: int) -> None:
        """Sends a range as the body of an answer whose head is written; returns when the kernel has it all.

        Args:
            request: whose connection; nothing else may be written to it meanwhile.
            fd: segment or file, not closed here.
            offset: first byte.
            length: bytes.

        Raises:
            TransferError: the receiver went away or stalls, or the file has become shorter; the connection is
                closed, so that nobody takes what arrived for the whole.
        """
        transport = request.transport
        if transport is None or transport.is_closing():
            raise TransferError("the receiver has gone")
        await _flushed(transport)
        left = threading.Event()
        # Descriptors of our own: the transport may close its socket, and the number be given to another.
        out, source = os.dup(transport.get_extra_info("socket").fileno()), os.dup(fd)
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._run, out, source, offset, length, left)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            left.set()
            work.add_done_callback(_ignore)
            transport.abort()
            raise
        except OSError as error:
            transport.abort()
            raise TransferError(f"transfer of {length} bytes broke: {error.strerror or error}") from error

    def call_off(self) -> None:
        """Lets running transfers end at once; their receivers see a broken answer."""
        self._is_closing.set()

    def close(self) -> None:
        """Ends running transfers and their threads."""
        self.call_off()
        self._pool.shutdown(wait=True, cancel_futures=False)

    def _run(self, out: int, source: int, offset: int, length: int, left: threading.Event) -> None:
        try:
            send = _sendfile
            while length > 0:
                self._wait(out, left)
                try:
                    sent = send(out, source, offset, min(length, _SEND_BYTES))
                except BlockingIOError:
                    continue
                except OSError as error:
                    if error.errno != errno.EINVAL or send is _bounce:
                        raise
                    send = _bounce  # hugetlb pages cannot be spliced
                    continue
                if sent == 0:
                    raise OSError(errno.EIO, f"file ends at byte {offset}, {length} more were promised")
                offset += sent
                length -= sent
        finally:
            os.close(out)
            os.close(source)

    def _wait(self, out: int, left: threading.Event) -> None:
        """Waits until the socket takes bytes, bounded."""
        poll = select.poll()
        poll.register(out, select.POLLOUT)
        deadline_s = time.monotonic() + IDLE_S
        while not poll.poll(_POLL_S * 1000):
            if left.is_set() or self._is_closing.is_set():
                raise OSError(errno.ECANCELED, "called off")
            if time.monotonic() > deadline_s:
                raise OSError(errno.ETIMEDOUT, f"the receiver took nothing for {IDLE_S:g} s")
        if left.is_set() or self._is_closing.is_set():
            raise OSError(errno.ECANCELED, "called off")


def _sendfile(out: int, source: int, offset: int, length: int) -> int:
    return os.sendfile(out, source, offset, length)


def _bounce(out: int, source: int, offset: int, length: int) -> int:
    block = os.pread(source, min(length, _BOUNCE_BYTES), offset)
    return os.write(out, block) if block else 0


async def _flushed(transport: asyncio.Transport) -> None:
    """Waits until the head has left the transport's own buffer; it is a few hundred bytes."""
    deadline_s = time.monotonic() + IDLE_S
    while transport.get_write_buffer_size() > 0:
        if transport.is_closing() or time.monotonic() > deadline_s:
            raise TransferError("the receiver took no head of an answer")
        await asyncio.sleep(0.001)


def _ignore(work: asyncio.Future[None]) -> None:
    if not work.cancelled():
        work.exception()  # was called off: how it ended does not matter

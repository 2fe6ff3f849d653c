"""One HTTP/1.1 connection: a request at a time, httptools for the answers, and as few calls as can be.

Made and given work by `connections`; tells `client` how each exchange went. When the peer ends a kept
connection, the request on it goes to another connection, uncounted, only where no byte of it can have been
processed. That is known in two ways, both from TCP itself:

- before the request was written the kernel had already heard that the peer had ended the connection;
- the peer's end arrived before any byte of an answer, and by then the peer's kernel had acknowledged nothing
  since the request was written. The peer's FIN carries its last acknowledgement, so what it had received when
  it ended its side is known; and a server that has ended its side cannot answer.

A reset tells nothing about what was received, so it is a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time
from collections.abc import Callable
from typing import cast

import httptools

from keystage.loadgen.sending.exchange import Exchange, Outcomes

MAX_HEAD_BYTES = 64 << 10
"""Of an answer's status line and headers, interim answers included."""

JOINED_BYTES = 64 << 10
"""Larger bodies are written beside the head instead of copied behind it."""


ESTABLISHED = 1
"""State of TCP: neither side has ended the connection (linux/tcp_states.h)."""

_BYTES = 128
_ACKED_AT = 120  # tcpi_bytes_acked of struct tcp_info (linux/tcp.h); tcpi_state is its first byte
_libc = ctypes.CDLL(None, use_errno=True)
_getsockopt = _libc.getsockopt
_buffer = ctypes.create_string_buffer(_BYTES)
_length = ctypes.c_uint(_BYTES)
_to, _size = ctypes.byref(_buffer), ctypes.byref(_length)
_acked = struct.Struct("=Q").unpack_from


def heard(descriptor: int) -> tuple[int, int]:
    """State of a connection, and bytes that the peer's kernel has acknowledged, its SYN counted.

    Args:
        descriptor: of the socket; of an open connection, for numbers are used again.

    Returns:
        Zeros for what is not known. One thread at a time. One system call and no object, for it is asked
        before every request on a kept connection (the socket that uvloop lends makes one at every call).
    """
    _length.value = _BYTES
    if _getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _to, _size):
        return 0, 0
    acked: int = _acked(_buffer, _ACKED_AT)[0] if _length.value >= _ACKED_AT + 8 else 0
    return _buffer.raw[0], acked


class Http1Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time.

    Args:
        outcomes: told how exchanges went.
        free: called with the connection when it can carry another exchange.
        gone: called when it never will again.

    Attributes:
        idle_since_s: `time.monotonic()` since when it carries nothing.
        is_offered: whether the pool has it among those that can carry more; kept by the pool.
    """

    __slots__ = (
        "_acked_bytes", "_descriptor", "_exchange", "_free", "_gone", "_has_framing", "_head_bytes",
        "_in_body", "_is_complete", "_is_kept", "_is_used", "_now_s", "_outcomes", "_parser", "_transport",
        "idle_since_s", "is_offered",
    )  # fmt: skip

    def __init__(
        self,
        outcomes: Outcomes,
        free: Callable[[Http1Connection], None],
        gone: Callable[[Http1Connection], None],
    ) -> None:
        self._outcomes = outcomes
        self._free = free
        self._gone = gone
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._is_used = False
        self._is_complete = False
        self._is_kept = False
        self._in_body = False
        self._has_framing = False
        self._head_bytes = 0
        self._acked_bytes = 0
        self._now_s = 0.0
        self.idle_since_s = 0.0
        self.is_offered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._descriptor: int = transport.get_extra_info("socket").fileno()

    @property
    def is_closing(self) -> bool:
        """Whether it takes no more work."""
        return self._transport.is_closing()

    def carry(self, exchange: Exchange) -> bool:
        """Sends a request; False, with nothing sent, where the peer has already ended the connection."""
        if self._is_used:
            state, self._acked_bytes = heard(self._descriptor)
            if state != ESTABLISHED:
                self._transport.abort()
                return False
        self._is_complete = self._in_body = self._has_framing = False
        self._head_bytes = 0
        self._exchange = exchange
        exchange.carrier = self
        route, body = exchange.route, exchange.body
        head = b"%b%d\r\n\r\n" % (route.head, len(body))
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return True

    def drop(self, exchange: Exchange) -> None:
        """Ends the connection: HTTP/1.1 has no other way to end an exchange."""
        self._exchange = None
        self._transport.abort()

    def close(self) -> None:
        """Ends the connection, whatever it carries."""
        self._exchange = None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of an answer."""
        exchange = self._exchange
        if exchange is None:  # nobody asked: not to be trusted with the next request
            self._transport.abort()
            return
        self._now_s = time.monotonic() - self._outcomes.start_s
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("bad_answer: the server switched to another protocol")
            return
        except httptools.HttpParserError as error:
            if not self._is_complete:
                self._fail(f"bad_answer: {type(error).__name__}: {error}")
                return
            self._is_kept = False  # bytes behind the answer: it is whole, the connection is not
        if self._is_complete:
            self._complete()
        elif not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(f"bad_answer: a head of over {MAX_HEAD_BYTES} bytes")
        elif exchange.answer.refused:
            self._fail(exchange.answer.refused)

    def on_message_begin(self) -> None:
        """Sees an answer that nobody asked for behind the one that was."""
        if self._is_complete:
            self._is_kept = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes whether the answer says where it ends."""
        if len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_framing = True

    def on_headers_complete(self) -> None:
        """Takes the status; interim answers (100, 103) are passed over."""
        status = self._parser.get_status_code()
        if self._exchange is not None and not self._is_complete and status >= 200:
            self._exchange.answer.status = status
            self._in_body = True

    def on_body(self, part: bytes) -> None:
        """Takes a part of the body."""
        if self._exchange is not None and not self._is_complete:
            self._exchange.answer.feed(part, self._now_s)

    def on_message_complete(self) -> None:
        """Notes the end; acted upon when all bytes that came with it are parsed."""
        if self._in_body and not self._is_complete:
            self._is_complete = True
            self._is_kept = self._parser.should_keep_alive()
        else:
            self._has_framing = False

    def eof_received(self) -> None:
        """The peer has ended its side."""
        exchange = self._exchange
        if exchange is None:
            return
        self._now_s = time.monotonic() - self._outcomes.start_s
        if self._in_body and not self._has_framing:
            self._is_kept = False
            self._complete()
        elif self._in_body or self._head_bytes:
            self._fail("disconnected: the server ended the connection within the answer")
        else:
            self._fail(
                "disconnected: the server ended the connection without an answer",
                processed=not self._is_untouched(),
            )

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is no more."""
        self._gone(self)
        if self._exchange is not None:
            self._now_s = time.monotonic() - self._outcomes.start_s
            self._fail(f"disconnected: {error or 'the connection was ended'}")

    def _complete(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        self._is_used = True
        # A body still being written when its answer is whole was refused unread: the connection is spent.
        if self._is_kept and not self._transport.get_write_buffer_size():
            self._free(self)
        else:
            self._transport.abort()
        self._outcomes.answered(exchange, self._now_s)

    def _fail(self, error: str, *, processed: bool = True) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        self._transport.abort()
        self._outcomes.failed(exchange, error, processed=processed)

    def _is_untouched(self) -> bool:
        """Whether the peer's kernel had acknowledged nothing since the request was written."""
        if not self._is_used or not self._acked_bytes:
            return False
        return heard(self._descriptor)[1] == self._acked_bytes

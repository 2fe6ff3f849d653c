"""Uvicorn's HTTP protocol, made fit for clients that mean harm, or offer protocols nobody takes.

- Some clients offer `Upgrade: h2c` with every request (Java's HttpClient, `curl --http2`). A server may pass
  that over (RFC 9110, 7.8), but the parser ends the message at its head and drops the body. Here the head is
  parsed again without the offer, so that the body follows.
- A head, or anything else without content, is bounded: 431 beyond it.
- Trailers are read and dropped; uvicorn adds them to the headers if they come early enough.
- A request that two servers could read differently is refused: the parser sees to lengths, chunks and line
  ends; here it is transfer codings beside `chunked`, no `Host` or several, versions other than 1.0 and 1.1.

Used by router and gateway; it must not know what is served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 1 << 16
"""Of request line and header fields, of trailers, and of what stands between the parts of a body."""
_OFFERS = frozenset({b"upgrade", b"http2-settings"})
_VERSIONS = frozenset({"1.0", "1.1"})
_BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})


class _Parser:
    """The parser, which goes on where an upgrade is not taken.

    Args:
        protocol: gets the callbacks.
    """

    def __init__(self, protocol: PassingProtocol) -> None:
        self._protocol = protocol
        self._renew()

    def __getattr__(self, name: str) -> Any:
        """Everything else."""
        return getattr(self._parser, name)

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        # As uvicorn has it: a request is answered though something follows its `Connection: close`.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:
        """Parses.

        Raises:
            httptools.HttpParserError: it is no HTTP, or asks for a tunnel.
            httptools.HttpParserUpgrade: another protocol takes over.
        """
        protocol = self._protocol
        while True:
            protocol.unread_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if protocol.takes_upgrade():
                    raise
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is not served") from None
                data = protocol.head_without_offer() + data[upgrade.args[0] :]
                self._renew()
            else:
                if protocol.unread_bytes > HEAD_BYTES:
                    protocol.refuse_head()
                return


class PassingProtocol(HttpToolsProtocol):
    """Uvicorn's; see the module.

    Attributes:
        unread_bytes: received since the last end of a head, part of a body, or end of a message.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = cast("httptools.HttpRequestParser", _Parser(self))
        self.unread_bytes = 0
        self._head_is_too_large = False
        self._fault = ""

    def takes_upgrade(self) -> bool:
        """Whether the message that was read last becomes another protocol: a WebSocket handshake alone."""
        is_plain = self.parser.get_method() != b"GET" or any(name in _BODY_FIELDS for name, _ in self.headers)
        return not is_plain and self._should_upgrade()

    def head_without_offer(self) -> bytes:
        """The head of the message that was read last, as if no upgrade had been offered."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                lines.append(b"connection: " + b", ".join(t for t in tokens if t.lower() not in _OFFERS))
            elif name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def refuse_head(self) -> None:
        """Ends the connection: what came is too large.

        Raises:
            httptools.HttpParserError: always; it is answered by `send_400_response`.
        """
        self._head_is_too_large = True
        raise httptools.HttpParserError(f"a request head has more than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """The head is there; it comes again if its offer is passed over."""
        self._fault = fault_of(self.parser.get_http_version(), self.headers)
        if self._fault:
            raise httptools.HttpParserError(self._fault)
        # The last bytes may be the body's: counted exactly only where it matters.
        if self.unread_bytes > HEAD_BYTES and self._head_size() > HEAD_BYTES:
            self.refuse_head()
        if not self.parser.should_upgrade():
            self.unread_bytes = 0
            super().on_headers_complete()
            self.headers = []  # the request keeps the list it has; trailers go to this one
        elif self.takes_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        self.unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The message is there."""
        self.unread_bytes = 0
        if not self.parser.should_upgrade() or self.takes_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what cannot be served, and closes; within another answer only the latter."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        if not self._head_is_too_large:
            super().send_400_response(f"{self._fault}\n" if self._fault else msg)
            return
        body = f"a request head has more than {HEAD_BYTES} bytes\n".encode()
        head = "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
        self.transport.write(
            f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        )
        self.transport.close()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)


def fault_of(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a head may mean different things to different servers, empty where it may not (RFC 9112, 3.2, 6.1).

    Args:
        version: as `1.1`.
        headers: lower-case names, values.
    """
    if version not in _VERSIONS:
        return f"HTTP/{version} is not served; HTTP/1.1 and HTTP/1.0 are"
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
            return "a Transfer-Encoding other than chunked, or in HTTP/1.0, is not served"
    if hosts > 1 or (not hosts and version == "1.1"):
        return f"a request has {hosts} Host fields; one is expected"
    return ""

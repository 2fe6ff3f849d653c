"""Uvicorn's HTTP protocol, without its loss of bodies under an `Upgrade` that is not taken.

Some clients offer `Upgrade: h2c` with every request (Java's HttpClient, `curl --http2`). A server may pass
that over (RFC 9110, 7.8), but the parser ends the message at its head and drops the body. Here the head is
parsed again without the offer, so that the body follows. Used by router and gateway; it must not know
what is served.
"""

from __future__ import annotations

from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = frozenset({b"upgrade", b"connection", b"http2-settings"})
_BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})


class _Parser:
    """The parser, which goes on where an upgrade is not taken.

    Args:
        protocol: gets the callbacks.
    """

    def __init__(self, protocol: PassingProtocol) -> None:
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)

    def __getattr__(self, name: str) -> Any:
        """Everything else."""
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parses.

        Raises:
            httptools.HttpParserError: it is no HTTP.
            httptools.HttpParserUpgrade: another protocol takes over.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._protocol.takes_upgrade():
                    raise
                head = self._protocol.head_without_offer()
                data = head + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self._protocol)


class PassingProtocol(HttpToolsProtocol):
    """Uvicorn's; see the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = cast("httptools.HttpRequestParser", _Parser(self))

    def takes_upgrade(self) -> bool:
        """Whether the message that was read last becomes another protocol: a WebSocket handshake alone."""
        is_plain = self.parser.get_method() != b"GET" or any(name in _BODY_FIELDS for name, _ in self.headers)
        return not is_plain and self._should_upgrade()

    def head_without_offer(self) -> bytes:
        """The head of the message that was read last, as if no upgrade had been offered."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in _OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        """The head is there; it comes again if its offer is passed over."""
        if not self.parser.should_upgrade() or self.takes_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The message is there."""
        if not self.parser.should_upgrade() or self.takes_upgrade():
            super().on_message_complete()

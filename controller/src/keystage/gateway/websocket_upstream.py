"""The replica's side of a WebSocket: connects, says what was refused, sends and receives messages.

Between `gateway.websocket` (which joins it to the client's side) and the `websockets` library. It
follows no redirects and uses no proxies; it must not retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from keystage.gateway.backend import GatewayError
from keystage.gateway.proxy import UpstreamFailed, UpstreamSilent
from keystage.gateway.upstream import CONNECT_S, NotConnected
from keystage.gateway.websocket_codes import ABNORMAL

CLOSE_S = 2.0
"""For the replica's answer to a close, and for the end of its connection."""
QUEUE_FRAMES = 2
"""Received and not yet taken; beyond, reading pauses and the replica's sending with it."""


class UpstreamRefused(GatewayError):
    """The replica answered the handshake with plain HTTP, which is the client's answer too."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(f"the replica refused with status {status}")
        self.status = status
        self.headers = headers
        self.body = body


class Closed(Exception):
    """The replica's side is closed; `code` 1006 means that it broke."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed with code {code} {reason}".rstrip())
        self.code = code
        self.reason = reason


class Upstream:
    """An open WebSocket to a replica.

    Attributes:
        subprotocol: what the replica chose, None for none.
        headers: of its answer to the handshake.
    """

    def __init__(self, connection: ClientConnection) -> None:
        assert connection.response is not None, "the handshake is over"
        self.subprotocol = connection.subprotocol
        self.headers = _raw(connection.response.headers.raw_items())
        self._connection = connection

    async def send(self, message: str | bytes) -> None:
        """Sends a message, and waits while the replica takes no more.

        Raises:
            Closed: it never will.
        """
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _closed(error) from error

    async def receive(self) -> str | bytes:
        """The next message.

        Raises:
            Closed: there is none; messages that came before the close are given first.
        """
        try:
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise _closed(error) from error

    async def close(self, code: int, reason: str) -> None:
        """Closes it, and waits for the replica's answer a moment."""
        await self._connection.close(code, reason)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._connection.transport.abort()


async def connect(
    address: str,
    target: str,
    headers: list[tuple[str, str]],
    subprotocols: list[str],
    *,
    max_message_bytes: int,
    ping_s: float,
    silence_s: float,
) -> Upstream:
    """Opens a WebSocket to a replica.

    Args:
        address: `host:port`.
        target: path and query, encoded.
        headers: to send beside those of the handshake.
        subprotocols: offered, in the client's order.
        max_message_bytes: larger messages of the replica end the connection with 1009.
        ping_s: seconds between pings.
        silence_s: seconds for the answer to the handshake, and to a ping.

    Raises:
        NotConnected: the replica takes no connection.
        UpstreamRefused: it answered with another status.
        UpstreamFailed: it broke the connection, or answered what is no handshake.
        UpstreamSilent: it did not answer.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    path, _, query = target.partition("?")
    offered = [Subprotocol(name) for name in subprotocols] or None
    uri = WebSocketURI(False, host, int(port), path, query)  # no TLS inside
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: ClientConnection(
                    ClientProtocol(uri, subprotocols=offered, max_size=max_message_bytes),
                    ping_interval=ping_s,
                    ping_timeout=silence_s,
                    close_timeout=CLOSE_S,
                    max_queue=QUEUE_FRAMES,
                ),
                host,
                int(port),
            )
    except OSError as error:  # TimeoutError is one
        raise NotConnected(f"took no connection: {error!r}") from error
    try:
        await _shake_hands(connection, headers, silence_s)
    except BaseException:
        connection.transport.abort()
        raise
    connection.start_keepalive()
    return Upstream(connection)


async def _shake_hands(
    connection: ClientConnection, headers: list[tuple[str, str]], silence_s: float
) -> None:
    try:
        async with asyncio.timeout(silence_s):
            await connection.handshake(headers, None)
    except TimeoutError as error:
        raise UpstreamSilent(f"did not answer a WebSocket handshake within {silence_s:g} s") from error
    except InvalidStatus as error:
        answer = error.response
        if not 200 <= answer.status_code <= 599:
            raise UpstreamFailed(f"answered a WebSocket handshake with {answer.status_code}") from error
        raise UpstreamRefused(
            answer.status_code, _raw(answer.headers.raw_items()), bytes(answer.body)
        ) from error
    except (WebSocketException, EOFError, OSError) as error:
        raise UpstreamFailed(f"did not answer a WebSocket handshake: {error}") from error


def _raw(items: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in items]


def _closed(error: ConnectionClosed) -> Closed:
    # What the replica said; else what this side said, as when a message was too large (1009).
    frame = error.rcvd or error.sent
    return Closed(frame.code, frame.reason) if frame is not None else Closed(ABNORMAL, "")

"""One GET at a bundle's home: opened, its head held against what was asked, its body read within bounds.

Below `bundle.home`, which knows files and hashes; `keysmanager.loader_http` opens its connections by it too.
Every wait is bounded: connecting, silence, and the whole (a timer shuts the socket, so that a trickle of
header lines ends too). No redirect is followed: an address that nobody named is not asked.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

_BLOCK_BYTES = 1024 * 1024
_NOT_FOUND = 404
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Another try makes sense."""


class HomeError(Exception):
    """The home did not give what was asked.

    Attributes:
        is_passing: whether another try may succeed.
    """

    def __init__(self, text: str, *, is_passing: bool = True) -> None:
        super().__init__(text)
        self.is_passing = is_passing


class NotThere(HomeError):
    """404."""

    def __init__(self) -> None:
        super().__init__(f"not there ({_NOT_FOUND})", is_passing=False)


class Body:
    """The body of an answer, read in order."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def read(self, most: int) -> bytes:
        """Some of the next bytes, at least one.

        Raises:
            HomeError: it ended, broke off or was too slow.
        """
        try:
            block = self._response.read1(min(most, _BLOCK_BYTES))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HomeError(f"broke off: {words(error)}") from error
        if not block:
            raise HomeError("broke off, or took too long")
        return block

    def skip(self, nbytes: int) -> None:
        """Reads bytes and drops them."""
        while nbytes > 0:
            nbytes -= len(self.read(nbytes))

    def read_all(self, most: int) -> bytes:
        """The whole of a small body.

        Raises:
            HomeError: larger than `most` bytes, or it broke off.
        """
        body = bytearray()
        try:
            while block := self._response.read1(_BLOCK_BYTES):
                body += block
                if len(body) > most:
                    raise HomeError(f"larger than {most} bytes", is_passing=False)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise HomeError(f"broke off: {words(error)}") from error
        if self._response.length:
            raise HomeError(f"broke off with {self._response.length} bytes missing, or took too long")
        return bytes(body)


@contextlib.contextmanager
def opened(
    url: str, start: int, nbytes: int | None, connect_s: float, silent_s: float, until_s: float
) -> Iterator[Body]:
    """Asks for a file from byte `start` on; a home without ranges gives all of it, the rest is dropped.

    Args:
        url: its address.
        start: bytes that are here already.
        nbytes: length of the whole file where it is known; another one is refused.
        connect_s: bound on connecting.
        silent_s: bound on silence.
        until_s: when all of it must be over (`time.monotonic`).

    Raises:
        HomeError: unreachable, another status or length than asked for.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise HomeError("no time is left", is_passing=False)
    connection = connection_to(url, min(connect_s, left_s))
    try:
        connection.connect()
        connection.sock.settimeout(silent_s)
        with bounded(connection.sock, until_s - time.monotonic()):
            headers = {"Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            connection.request("GET", target(url), headers=headers)
            response = connection.getresponse()
            body = Body(response)
            if _check(response, start, nbytes) < start:
                body.skip(start)
            yield body
    except (OSError, http.client.HTTPException) as error:
        raise HomeError(words(error)) from error
    finally:
        connection.close()


def _check(response: http.client.HTTPResponse, start: int, nbytes: int | None) -> int:
    """Holds the head of an answer against the question; returns the position its body starts at."""
    status = response.status
    if status == _NOT_FOUND:
        raise NotThere
    if status not in (http.client.OK, http.client.PARTIAL_CONTENT):
        where = response.headers.get("Location")
        more = f" to {where[:200]!r}: redirects are not followed" if where else ""
        raise HomeError(f"status {status}{more}", is_passing=status in _PASSING)
    begun = start if status == http.client.PARTIAL_CONTENT else 0
    if status == http.client.PARTIAL_CONTENT:
        given = response.headers.get("Content-Range", "")
        if not start or not given.startswith(f"bytes {start}-"):
            raise HomeError(f"Content-Range {given[:100]!r}, bytes from {start} on were asked for")
    if nbytes is not None and response.length is not None and response.length != nbytes - begun:
        raise HomeError(f"{begun + response.length} bytes, the bundle says {nbytes}", is_passing=False)
    return begun


def connection_to(url: str, connect_s: float) -> http.client.HTTPConnection:
    """A connection to the host of an address, not open yet.

    Raises:
        HomeError: no `http(s)://` address of a host, or one with credentials.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise HomeError(f"no address: {error}", is_passing=False) from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise HomeError("http(s)://host:port without credentials is needed", is_passing=False)
    try:
        host.encode("idna")
        target(url).encode("ascii")
    except UnicodeError as error:
        raise HomeError(f"no address: {error}", is_passing=False) from error
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=connect_s, context=context)
    return http.client.HTTPConnection(host, port, timeout=connect_s)


def target(url: str) -> str:
    """The path and query of an address, as they stand in a request line."""
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def shut(sock: socket.socket) -> None:
    """Ends a connection, and every receive on it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def bounded(sock: socket.socket, limit_s: float) -> Iterator[None]:
    """Shuts a connection after a while: time-outs of single receives do not end a trickle."""
    timer = threading.Timer(max(0.0, limit_s), shut, (sock,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def words(error: Exception) -> str:
    """What went wrong with a connection."""
    return "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__

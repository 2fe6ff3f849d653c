"""Ranges of a file over HTTP, received straight into memory; small files as a whole.

Used by `source_peer` and `source_home` from the loader's threads, and by `catalog`. The standard
library's client reads into a given buffer without a copy; an asynchronous one would hand out objects
to be copied. Whatever an answer claims is held against what was asked before a byte is taken:
status, range, length. No redirect is followed: a token must not travel to an address nobody named.
"""

from __future__ import annotations

import http.client
import socket
import time

import msgspec

from keystage.bundle.home import MAX_SMALL_BYTES
from keystage.bundle.home_http import HomeError, bounded, connection_to, shut, target, words
from keystage.keysmanager.loader_source import Busy, NotThere, SourceError

RETRY_AFTER_LIMIT_S = 5.0
"""Longest pause that a busy server is granted between two questions."""
_NOT_MODIFIED, _NOT_FOUND, _UNAVAILABLE = 304, 404, 503


class HttpLimits(msgspec.Struct, frozen=True):
    """How long a server may keep a lane waiting.

    Attributes:
        connect_s: until the connection stands.
        silent_s: without a single byte.
        span_s: for one range (at most 16 MiB) from request to last byte: also ends a trickle.
    """

    connect_s: float = 2.0
    silent_s: float = 5.0
    span_s: float = 30.0


PEER_LIMITS = HttpLimits()
HOME_LIMITS = HttpLimits(connect_s=10.0, silent_s=15.0, span_s=120.0)
"""A home may be far: 16 MiB in 120 s is 140 kB/s a lane."""


def connect(url: str, limits: HttpLimits) -> http.client.HTTPConnection:
    """Opens a connection to the host of an address.

    Raises:
        SourceError: bad address, unreachable, certificate refused.
    """
    try:
        connection = connection_to(url, limits.connect_s)
        connection.connect()
    except HomeError as error:
        raise SourceError(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(f"no connection within {limits.connect_s:g} s: {words(error)}") from error
    return connection


class RangeReader:
    """Reads ranges of one address over one kept-alive connection (see `loader_source.Reader`)."""

    def __init__(self, url: str, nbytes: int, headers: dict[str, str], limits: HttpLimits) -> None:
        """Connects.

        Args:
            url: of the file.
            nbytes: its length as the bundle has it.
            headers: sent with every request.
            limits: how long it may take.

        Raises:
            SourceError: unreachable.
        """
        self._url = url
        self._target = target(url)
        self._nbytes = nbytes
        self._headers = headers
        self._limits = limits
        self._connection = connect(url, limits)
        # Its receive buffer is left to the kernel: one that is set is capped low and no longer grows.
        self._sock: socket.socket = self._connection.sock
        self._response: http.client.HTTPResponse | None = None
        self._left = 0
        self._deadline_s = 0.0

    def start(self, offset: int, length: int) -> None:
        """Asks for a range and checks the head of the answer."""
        self._deadline_s = time.monotonic() + self._limits.span_s
        last = offset + length - 1
        try:
            if self._connection.sock is not self._sock:  # the server closed it after its last answer
                self._connection.close()
                self._connection = connect(self._url, self._limits)
                self._sock = self._connection.sock
            self._sock.settimeout(self._limits.silent_s)
            with bounded(self._sock, self._limits.span_s):
                self._connection.request(
                    "GET", self._target, headers={**self._headers, "Range": f"bytes={offset}-{last}"}
                )
                response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"no answer within {self._limits.silent_s:g} s: {words(error)}") from error
        self._response = response
        if response.status == _UNAVAILABLE:
            self._connection.close()  # the next question gets a new one; the head stays readable
        check_status(response, http.client.PARTIAL_CONTENT)
        given, wanted = response.headers.get("Content-Range"), f"bytes {offset}-{last}/{self._nbytes}"
        if given != wanted:
            raise SourceError(f"Content-Range {given!r}, {wanted!r} expected")
        if response.length != length:
            raise SourceError(f"Content-Length {response.length}, {length} expected")
        self._left = length

    def fill(self, view: memoryview) -> None:
        """Receives the next bytes of the range into `view`."""
        response = self._response
        assert response is not None, "fill without start"
        assert len(view) <= self._left, f"{len(view)} bytes wanted, {self._left} left of the range"
        position = 0
        while position < len(view):
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise SourceError(
                    f"too slow: {self._left} bytes of a range missing after {self._limits.span_s:g} s"
                )
            self._sock.settimeout(min(self._limits.silent_s, left_s))
            try:
                with view[position:] as rest:
                    got = response.fp.readinto1(rest)
            except TimeoutError as error:
                raise SourceError(
                    f"silent for {min(self._limits.silent_s, left_s):.1f} s with {self._left} bytes missing"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise SourceError(
                    f"connection broke with {self._left} bytes missing: {words(error)}"
                ) from error
            if got == 0:
                raise SourceError(f"truncated: {self._left} bytes of a range missing")
            position += got
            self._left -= got
        if self._left == 0:
            response.close()  # keeps the connection for the next range

    def abort(self) -> None:
        """Shuts the connection, so that a blocked receive ends."""
        shut(self._sock)

    def close(self) -> None:
        """Closes the connection."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def check_status(response: http.client.HTTPResponse, expected: int) -> None:
    """Holds the status of an answer against the one expected.

    Raises:
        NotThere: 404.
        Busy: 503 with a Retry-After in seconds.
        SourceError: another one; a redirect is named with its address, which is not asked.
    """
    if response.status == expected:
        return
    if response.status in {301, 302, 303, 307, 308}:
        where = response.headers.get("Location", "nowhere")[:200]
        raise SourceError(f"redirects to {where!r}: redirects are not followed")
    if response.status == _NOT_FOUND:
        raise NotThere("not there (404)")
    pause = response.headers.get("Retry-After", "")
    if response.status == _UNAVAILABLE and pause.isdecimal():
        raise Busy(f"busy ({_UNAVAILABLE}, Retry-After {pause[:9]})", min(float(pause), RETRY_AFTER_LIMIT_S))
    if response.status in {401, 403}:
        raise SourceError(f"refuses our token ({response.status})")
    if expected == http.client.PARTIAL_CONTENT and response.status == http.client.OK:
        raise SourceError("answers a range with the whole file (200): it must serve ranges (206)")
    try:
        reason = " ".join(response.read(200).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException) as error:
        reason = words(error)
    raise SourceError(f"status {response.status}, {expected} expected: {reason or response.reason}")


class SmallFile(msgspec.Struct, frozen=True):
    """A small file as a server gave it.

    Attributes:
        body: its bytes; None: unchanged since `etag`.
        etag: names this version; empty where the server names none.
    """

    body: bytes | None
    etag: str


def get_small(url: str, etag: str = "", limits: HttpLimits = HOME_LIMITS) -> SmallFile:
    """Fetches a small file.

    Args:
        url: its address.
        etag: of the version at hand; empty: none.
        limits: `span_s` bounds the whole.

    Raises:
        NotThere: 404.
        SourceError: unreachable, another status than 200 (or 304), larger than `MAX_SMALL_BYTES`.
    """
    connection = connect(url, limits)
    try:
        connection.sock.settimeout(limits.silent_s)
        with bounded(connection.sock, limits.span_s):
            connection.request("GET", target(url), headers={"If-None-Match": etag} if etag else {})
            response = connection.getresponse()
            if etag and response.status == _NOT_MODIFIED:
                return SmallFile(None, etag)
            check_status(response, http.client.OK)
            body = bytearray()
            while block := response.read1(1 << 20):
                body += block
                if len(body) > MAX_SMALL_BYTES:
                    raise SourceError(f"larger than {MAX_SMALL_BYTES} bytes")
        if response.length:
            raise SourceError(
                f"broken off with {response.length} bytes missing, after {limits.span_s:g} s at most"
            )
        return SmallFile(bytes(body), response.headers.get("ETag", ""))
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(f"no answer: {words(error)}") from error
    finally:
        connection.close()

"""Where requests go: the peer to connect to, and the request's head, made once and not a request.

Comes after `target` (which says URL and headers) and before `http1` and `http2`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

from keystage.loadgen.sending.answers import Answer, JsonAnswer, StreamAnswer

Version = Literal["1.1", "2"]
VERSIONS: tuple[Version, ...] = ("1.1", "2")

Reading = Literal["times", "json", "stream"]
"""What is read of answers: only times, tokens told in JSON, or a stream of tokens."""

_ANSWERS: Mapping[Reading, Callable[[], Answer]] = {
    "times": Answer,
    "json": JsonAnswer,
    "stream": StreamAnswer,
}
_PORTS = {"http": 80, "https": 443}
_SAFE = "/%:@!$&'()*+,;=~-._?"


class RouteError(Exception):
    """An address that no request can be sent to; names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """What a connection is made to.

    Attributes:
        host: name or address, without brackets.
        port: TCP port.
        is_tls: whether the connection is encrypted.
    """

    host: str
    port: int
    is_tls: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One address of a plan, ready to send to.

    Attributes:
        peer: where its connections go.
        head: HTTP/1.1 head up to and with `Content-Length: `; the length and two line ends follow.
        fields: HTTP/2 header fields, `content-length` apart.
        new_answer: makes what reads one answer.
    """

    peer: Peer
    head: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    new_answer: Callable[[], Answer]


def route(url: str, headers: Mapping[str, str], reading: Reading) -> Route:
    """Makes the route of POST requests to a URL.

    Raises:
        RouteError: no http(s) address, a user in it, a port out of range, or a header with a line end.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RouteError(f"{url!r} is no address: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise RouteError(f"{url!r} is no http(s)://host... address")
    if parts.username is not None or parts.password is not None:
        raise RouteError(f"the address of {parts.hostname!r} holds a user or password, which is not sent")
    for name, value in headers.items():
        if any(character in name + value for character in "\r\n\0"):
            raise RouteError(f"header {name!r} holds a line end or a zero byte")
    peer = Peer(parts.hostname, _PORTS[parts.scheme] if port is None else port, parts.scheme == "https")
    path = quote(parts.path or "/", safe=_SAFE)
    if parts.query:
        path += "?" + quote(parts.query, safe=_SAFE)
    host = f"[{peer.host}]" if ":" in peer.host else peer.host
    try:
        authority = (host if port is None else f"{host}:{port}").encode("ascii" if host.isascii() else "idna")
    except UnicodeError as error:
        raise RouteError(f"{url!r} is no address: {error}") from error
    lines = [f"POST {path} HTTP/1.1".encode("ascii"), b"Host: " + authority]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
    fields = (
        (b":method", b"POST"),
        (b":scheme", parts.scheme.encode()),
        (b":authority", authority),
        (b":path", path.encode("ascii")),
        *((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
    )
    return Route(peer, b"\r\n".join([*lines, b"Content-Length: "]), fields, _ANSWERS[reading])

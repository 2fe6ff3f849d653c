"""Which headers cross the gateway, in either direction.

Pure; RFC 9110 section 7.6.1: hop-by-hop fields and those that `Connection` names belong to one
connection and are not forwarded; section 7.6.3: a gateway names itself in `Via`. Used by
`gateway.proxy`, `gateway.websocket`, `gateway.queue_calls` and `gateway.queue_attempt`.
"""

from __future__ import annotations

from collections.abc import Iterable

from keystage.gateway.types import GATEWAY_INFO

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
HANDSHAKE = frozenset(
    {
        b"sec-websocket-accept",
        b"sec-websocket-extensions",
        b"sec-websocket-key",
        b"sec-websocket-protocol",
        b"sec-websocket-version",
    }
)
"""Belong to one WebSocket connection; each side of the gateway has its own."""
SERVED_BY = (b"x-served-by", f"keystage/{GATEWAY_INFO.version.release}".encode())
"""In every answer to an invocation, as an OpenFaaS gateway names itself."""
_VIA = b"keystage"
_OURS = HOP_BY_HOP | {
    b"expect",
    b"host",
    b"via",
    b"x-call-id",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-start-time",
}
_TOLD = HOP_BY_HOP | {b"x-call-id", b"x-served-by", b"x-start-time"}
_SCHEMES = {b"http": b"http", b"https": b"https", b"ws": b"http", b"wss": b"https"}
_LASTING = (b"keep-alive", b"close", b"Keep-Alive", b"Close")
Pairs = Iterable[tuple[bytes, bytes]]


def end_to_end(pairs: Pairs, drop: frozenset[bytes] = HOP_BY_HOP) -> list[tuple[bytes, bytes]]:
    """Keeps what may be forwarded.

    Args:
        pairs: names in any case, and values.
        drop: lower-case names to leave out, beside those that `Connection` names.

    Returns:
        Lower-case names and values, in order, repeated ones kept.
    """
    kept = []
    named: set[bytes] = set()
    for name, value in pairs:
        lower = name.lower()
        if lower == b"connection" and value not in _LASTING:
            named.update(token.strip() for token in value.lower().split(b","))
        if lower not in drop:
            kept.append((lower, value))
    if named:
        return [pair for pair in kept if pair[0] not in named]
    return kept


def for_client(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    """Headers of a replica's answer for the client: without those that the gateway itself tells."""
    return end_to_end(pairs, _TOLD)


def for_replica(pairs: Pairs, *, client: str, scheme: str, version: str) -> list[tuple[bytes, bytes]]:
    """Headers of the request to a replica, but `X-Call-Id` and `X-Start-Time`, which the caller adds.

    What a proxy before this one told of the client stays: its `X-Forwarded-Host` and
    `X-Forwarded-Proto`, and its list in `X-Forwarded-For`, to which this one adds.

    Args:
        pairs: the client's headers, lower-case names.
        client: the client's address.
        scheme: `http`, `https`, `ws` or `wss`.
        version: the HTTP version in which it came.
    """
    pairs = list(pairs)
    headers = end_to_end(pairs, _OURS)
    chain: list[bytes] = []
    via: list[bytes] = []
    host = told_host = proto = b""
    for name, value in pairs:
        if name == b"host":
            host = value
        elif name == b"x-forwarded-for":
            chain.append(value)
        elif name == b"x-forwarded-host":
            told_host = told_host or value
        elif name == b"x-forwarded-proto":
            proto = proto or _SCHEMES.get(value.lower(), b"")
        elif name == b"via":
            via.append(value)
    chain.append(client.encode("latin-1"))
    via.append(version.encode("latin-1") + b" " + _VIA)
    headers.append((b"x-forwarded-for", b", ".join(chain)))
    headers.append((b"x-forwarded-proto", proto or _SCHEMES.get(scheme.encode(), b"http")))
    if told_host or host:
        headers.append((b"x-forwarded-host", told_host or host))
    headers.append((b"via", b", ".join(via)))
    return headers

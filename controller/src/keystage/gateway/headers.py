"""Which headers cross the gateway, in either direction.

Pure; RFC 9110 section 7.6.1: hop-by-hop fields and those that `Connection` names belong to one
connection and are not forwarded. Used by `gateway.proxy`.
"""

from __future__ import annotations

from collections.abc import Iterable

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
_OURS = HOP_BY_HOP | {b"host", b"expect", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"}
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
    for name, value in pairs:
        lower = name.lower()
        if lower == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            drop = drop | {token.strip() for token in value.lower().split(b",")}
        kept.append((lower, value))
    return [pair for pair in kept if pair[0] not in drop]


def for_upstream(pairs: Pairs, *, client: str, scheme: str) -> list[tuple[str, str]]:
    """Headers of the request to a replica.

    Args:
        pairs: the client's headers, lower-case names.
        client: the client's address.
        scheme: `http` or `https`.
    """
    pairs = list(pairs)
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in end_to_end(pairs, _OURS)]
    chain = [v.decode("latin-1") for k, v in pairs if k == b"x-forwarded-for"]
    headers.append(("x-forwarded-for", ", ".join([*chain, client])))
    headers.append(("x-forwarded-proto", scheme))
    headers.extend(("x-forwarded-host", v.decode("latin-1")) for k, v in pairs if k == b"host")
    return headers

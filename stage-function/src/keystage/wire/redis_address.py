"""The address of a Redis, as a person gives it to a gateway or a router; scripts that Redis runs.

Pure. A password in an address may not reach a message or a log; `shown` gives what may.
"""

from __future__ import annotations

import dataclasses
import hashlib
import urllib.parse

REDIS_SCHEMES = ("redis", "rediss", "unix")
PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A Lua program; Redis keeps those it has run under their digest."""

    text: str

    @property
    def sha1(self) -> str:
        """Its digest, by which EVALSHA names it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def shown(url: str) -> str:
    """Scheme, host and port (a socket's path) of an address: what a log may say."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "an address that cannot be read"
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port or PORTS.get(parts.scheme, 0)}"


def check_redis(url: str) -> None:
    """Refuses what is no address of a Redis.

    Raises:
        ValueError: says what is expected, never what was given.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        has_place = bool(parts.path if parts.scheme == "unix" else parts.hostname) and parts.port != 0
        database = parts.path.strip("/")
        is_numbered = parts.scheme == "unix" or not database or (database.isascii() and database.isdigit())
    except ValueError:
        has_place = is_numbered = False
    if not has_place or not is_numbered or parts.scheme not in REDIS_SCHEMES:
        raise ValueError(
            "expected redis://[user:password@]host[:port][/database], rediss://... or unix://path"
        )

"""Addresses that a person gives to the asynchronous queue: Redis, and where answers may be sent.

Pure. Neither a password in an address nor the path of a callback (which often holds a token) may
reach a message or a log; `shown` gives what may.
"""

from __future__ import annotations

import dataclasses
import urllib.parse

import yarl

from keystage.gateway.backend import BadRequest

REDIS_SCHEMES = ("redis", "rediss", "unix")
MAX_URL = 2048
_PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}


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
    return f"{parts.scheme}://{host}:{port or _PORTS.get(parts.scheme, 0)}"


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


@dataclasses.dataclass(frozen=True, slots=True)
class CallbackRules:
    """Where answers may be sent.

    Attributes:
        hosts: `name`, `*.name` (any name below it), either with `:port`; empty: anywhere.
    """

    hosts: tuple[str, ...] = ()

    def check(self, url: str) -> None:
        """Refuses a callback that may not be called.

        Raises:
            BadRequest: names the rule; of the address only host and port.
        """
        if len(url) > MAX_URL:
            raise BadRequest(f"X-Callback-Url has {len(url)} characters, at most {MAX_URL} are taken")
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
            yarl.URL(url)  # what the client could not call is not accepted either
        except ValueError as error:
            raise BadRequest(f"X-Callback-Url is no address: {_reason(error)}") from None
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not host or not is_plain:
            raise BadRequest("X-Callback-Url must be http://host[:port]/path or https://..., in ASCII")
        if self.hosts and not any(_matches(rule, host, port or _PORTS[parts.scheme]) for rule in self.hosts):
            raise BadRequest(
                f"X-Callback-Url names {host}:{port or _PORTS[parts.scheme]}, which is not among the hosts "
                "allowed here (KEYSTAGE_CALLBACK_HOSTS)"
            )


def _matches(rule: str, host: str, port: int) -> bool:
    name, colon, number = rule.lower().rpartition(":")
    if not colon or not number.isdigit():
        name, number = rule.lower(), ""
    if number and int(number) != port:
        return False
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host == name.strip("[]")


def _reason(error: ValueError) -> str:
    # The standard library's texts may repeat parts of the address.
    return "its port is no number" if "ort" in str(error) else "its host cannot be read"

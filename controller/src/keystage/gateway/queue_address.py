"""Where answers of asynchronous calls may be sent.

Pure. The path of a callback (which often holds a token) may not reach a message or a log;
`wire.redis_address.shown` gives what may.
"""

from __future__ import annotations

import dataclasses
import urllib.parse

import yarl

from keystage.gateway.backend import BadRequest
from keystage.wire.redis_address import PORTS

MAX_URL = 2048


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
        except (ValueError, IndexError) as error:  # the latter: yarl, of `http://[::1]:@/`
            raise BadRequest(f"X-Callback-Url is no address: {_reason(error)}") from None
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not host or not is_plain:
            raise BadRequest("X-Callback-Url must be http://host[:port]/path or https://..., in ASCII")
        if self.hosts and not any(_matches(rule, host, port or PORTS[parts.scheme]) for rule in self.hosts):
            raise BadRequest(
                f"X-Callback-Url names {host}:{port or PORTS[parts.scheme]}, which is not among the hosts "
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


def _reason(error: Exception) -> str:
    # The standard library's texts may repeat parts of the address.
    return "its port is no number" if "ort" in str(error) else "its host cannot be read"

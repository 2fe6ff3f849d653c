"""Who answers in front of a gateway, and how long the gateway itself waits, as far as both can be seen.

Keystage's gateway names no server in its answers, so a `Server` or `Via` there is that of a proxy, which
tells no time-outs: its default is taken, or what a person says (`--proxy-timeout`). A gateway of this machine
keeps its own in its environment. Used by `doctor_gateway` for the chain of time-outs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from keystage.cli.doctor_chain import Link
from keystage.cli.figures import clean

SETTING = "--proxy-timeout"
DEFAULT_S = 600.0
"""The gateway's own default of KEYSTAGE_TIMEOUT_S."""
_KNOWN = (
    ("nginx", "proxy_read_timeout", 60.0),
    ("openresty", "proxy_read_timeout", 60.0),
    ("envoy", "the route's timeout", 15.0),
    ("apache", "ProxyTimeout", 60.0),
)
"""What sets it, and its default in seconds, by a word of its name (vendors' manuals)."""


def link(headers: Mapping[str, str], timeout_s: float | None) -> Link | None:
    """The proxy in front, None where none is seen and none was told.

    Args:
        headers: of an answer of the gateway, names in lower case.
        timeout_s: how long it waits, as a person says; None: its default.
    """
    name = clean(headers.get("server", "") or headers.get("via", ""), 60)
    if timeout_s is not None:
        setting = next((known[1] for known in _KNOWN if known[0] in name.lower()), SETTING)
        return Link(f"proxy {name}".strip(), setting, timeout_s)
    for word, setting, default_s in _KNOWN:
        if word in name.lower():
            return Link(f"proxy {name}", setting, default_s, is_known=False)
    return None


def _is_gateway(command: Sequence[str]) -> bool:
    """Whether it is `python -m keystage.gateway.app`, or `keystage gateway`."""
    return "keystage.gateway.app" in command or command[-1:] == ["gateway"]


def own_timeout_s(url: str) -> float | None:
    """KEYSTAGE_TIMEOUT_S of the process that listens at a loopback address, None: it cannot be seen."""
    import psutil

    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found: list[int] = []
    with contextlib.suppress(psutil.Error, OSError):
        found = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.pid
            and connection.laddr
            and connection.laddr.port == port
        ]
    for pid in found:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            # Of those that hold a socket psutil tells one: it may be `keystage up`, whose gateway has it too.
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                if _is_gateway(process.cmdline()):
                    return float(process.environ().get("KEYSTAGE_TIMEOUT_S") or DEFAULT_S)
    return None  # a proxy, a forward, a process of another user

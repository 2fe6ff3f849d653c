"""Asks a running system over its control socket, for commands beside `keystage up`.

Used by `keystage demo` after a replay and by `keystage upgrade`. One request a call, bounded waits, standard
library only. It must not write what is deployed or how many: gateway and controller do that.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from keystage.local.api import StartRecord, Successor, UpgradeRequest, UpgradeStatus
from keystage.local.errors import NotReady, NotUpgraded
from keystage.local.home import control_socket
from keystage.wire.unreadable import UNREADABLE

TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 90.0
"""A little more than a supervisor gives another installation to say what it is."""
T = TypeVar("T")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def starts(home: Path) -> list[StartRecord]:
    """How the newest starts of the system on a state folder went.

    Raises:
        LocalError: nothing runs there, or it does not answer.
    """
    return _asked(home, "GET", "/starts", list[StartRecord])


def begin_upgrade(home: Path, request: UpgradeRequest) -> Successor:
    """Lets the system on a state folder become another installation; answers which.

    Raises:
        LocalError: nothing runs there, it does not answer, or it cannot become that one.
    """
    return _asked(home, "POST", "/upgrade", Successor, msgspec.json.encode(request), CHECK_TIMEOUT_S)


def upgrade_status(home: Path) -> UpgradeStatus:
    """How the upgrade of the system on a state folder stands.

    Raises:
        LocalError: nothing runs there, or it does not answer.
    """
    return _asked(home, "GET", "/upgrade", UpgradeStatus)


def _asked(
    home: Path, method: str, path: str, kind: type[T], body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> T:
    control = control_socket(home)
    connection = _Connection(control, timeout_s)
    what = f"{method} {path} on {control}"
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        told = answer.read()
        if answer.status == http.client.NOT_FOUND and method == "POST":
            raise NotUpgraded(
                "the `keystage up` that runs there is of a version that cannot: end it, start it anew"
            )
        if answer.status == http.client.CONFLICT:
            raise NotUpgraded(msgspec.json.decode(told, type=dict[str, str])["error"])
        if answer.status >= http.client.MULTIPLE_CHOICES:
            raise NotReady(f"{what} answered {answer.status}")
        return msgspec.json.decode(told, type=kind)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"{what}: {error or type(error).__name__}") from error
    except UNREADABLE as error:
        raise NotReady(f"{what} answered what cannot be read: {error}") from error
    finally:
        connection.close()

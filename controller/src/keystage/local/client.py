"""Reads from a running system's control socket, for commands beside `keystage up`.

Used by `keystage demo` after a replay. One request a call, bounded waits, standard library only. It must
not write: gateway and controller do that.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import msgspec

from keystage.local.api import StartRecord
from keystage.local.errors import NotReady
from keystage.local.home import control_socket

TIMEOUT_S = 5.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def starts(home: Path) -> list[StartRecord]:
    """How the newest starts of the system on a state folder went.

    Raises:
        LocalError: nothing runs there, or it does not answer.
    """
    path = control_socket(home)
    connection = _Connection(path)
    try:
        connection.request("GET", "/starts")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise NotReady(f"GET /starts on {path} answered {answer.status}")
        return msgspec.json.decode(body, type=list[StartRecord])
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise NotReady(f"GET /starts on {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()

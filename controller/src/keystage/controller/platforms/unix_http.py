"""JSON over HTTP on a UNIX socket or a TCP address, with bounded waits and the standard library.

Used by `platforms.local` alone. It keeps no connection: the supervisor may be restarted between two
ticks, and a connection to a socket on the same machine costs tens of microseconds.
"""

from __future__ import annotations

import http.client
import socket

from keystage.controller.domain.platform import PlatformError


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a UNIX socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Opens the socket (called by the base class)."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self.sock = connection


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    """Sends one request, closes the connection, returns status and body.

    Raises:
        PlatformError: no answer, or not one of HTTP.
    """
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise PlatformError(f"{method} {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()

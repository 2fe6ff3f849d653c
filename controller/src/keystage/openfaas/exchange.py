"""One HTTP exchange with a gateway: bounded wait, basic auth, TLS where the address says so.

Before it: `openfaas.client` and the controller's platform. It keeps no connection: a gateway may be
replaced between two requests. Redirects are not followed: they would carry the credentials elsewhere.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import socket
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from keystage.openfaas.errors import BadAddress, BadAnswer, BadPassword, Unreachable

MAX_ANSWER_BYTES = 64 << 20
"""No list of functions or tail of a log is longer; beyond it something else answers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """User and password of a gateway's management API."""

    user: str
    password: str = dataclasses.field(repr=False)

    def header(self) -> str:
        """Value of the Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def read_password(user: str, file: Path) -> Credentials:
    """Credentials with the password of a file, without the end of its line.

    Raises:
        BadPassword: the file cannot be read, or has none.
    """
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadPassword(f"password file {file} cannot be read: {reason}") from error
    if not password:
        raise BadPassword(f"password file {file} is empty")
    return Credentials(user, password)


def gateway_address(url: str) -> SplitResult:
    """Splits a gateway's address.

    Raises:
        BadAddress: names what is wrong with it; a password in it is not repeated.
    """
    shown = repr(url[:200]) if "@" not in url else "(not shown, it holds an @)"
    not_one = f"gateway address {shown} must be http://HOST[:PORT] or https://HOST[:PORT]"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadAddress(not_one) from None  # the cause repeats the address
    if parts.username is not None or parts.password is not None:
        raise BadAddress("the gateway's address must not hold credentials: give user and password file apart")
    if any(c.isspace() or not c.isprintable() for c in url):
        raise BadAddress(f"gateway address {shown} must have neither white space nor control characters")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadAddress(not_one)
    if parts.query or parts.fragment:
        raise BadAddress(f"gateway address {shown} must have neither query nor fragment")
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """How a gateway is reached.

    Attributes:
        url: its address.
        credentials: None for a gateway without basic auth.
        timeout_s: bound of one whole exchange, from the connect to the answer's last byte, in seconds.
    """

    url: str
    credentials: Credentials | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        gateway_address(self.url)

    def exchange(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """Sends one request; returns status and body.

        Args:
            method: HTTP method.
            path: path and query.
            body: JSON, None for none.
            timeout_s: in place of the usual bound.

        Raises:
            Unreachable: no whole answer in time, or not one of HTTP.
            BadAnswer: a body beyond its bound.
        """
        parts = gateway_address(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        bound_s = timeout_s or self.timeout_s
        deadline_s = time.monotonic() + bound_s
        connection = kind(parts.hostname or "", parts.port, timeout=bound_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self.credentials is not None:
            headers["Authorization"] = self.credentials.header()
        try:
            connection.connect()
            connection.sock.settimeout(_left_s(deadline_s))
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            source = _Source(connection.sock, deadline_s)
            answer = http.client.HTTPResponse(cast("socket.socket", source), method=method)
            answer.begin()
            content = answer.read(MAX_ANSWER_BYTES + 1)
            missing = (answer.length or 0) if len(content) <= MAX_ANSWER_BYTES else 0
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"{self.asked(method, path)} got no answer: {reason}") from error
        finally:
            connection.close()
        if missing:  # a bounded read does not tell
            raise Unreachable(
                f"{self.asked(method, path)} was cut off {missing} bytes before the answer's end"
            )
        if len(content) > MAX_ANSWER_BYTES:
            raise BadAnswer(
                f"{self.asked(method, path)} answered more than {MAX_ANSWER_BYTES} bytes", answer.status
            )
        return answer.status, content

    def asked(self, method: str, path: str) -> str:
        """Method and whole address, for messages."""
        return f"{method} {self.url.rstrip('/')}{path}"


class _Source:
    """A socket as `HTTPResponse` takes it: reads end at one time, however many they are."""

    def __init__(self, of: socket.socket, deadline_s: float) -> None:
        self._of = of
        self._deadline_s = deadline_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What is read from."""
        return io.BufferedReader(_Reads(self._of, self._deadline_s))


class _Reads(io.RawIOBase):
    def __init__(self, of: socket.socket, deadline_s: float) -> None:
        self._of = of
        self._deadline_s = deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._of.settimeout(_left_s(self._deadline_s))
        return self._of.recv_into(buffer)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s

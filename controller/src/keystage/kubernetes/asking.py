"""Bounded HTTP exchanges between Keystage's own pods, with the release's internal token.

Before it: pods of gateways, KeysManagers and workers by address. After it: `polled`, `keysmanagers`,
`activate`, `resize`. Connections are kept. A peer that fails is `NotAnswered` with the reason in words; what
that means is for who asked. It must not retry.
"""

from __future__ import annotations

import http.client
from pathlib import Path

import urllib3

from keystage.kubernetes.api import TOKEN_PURPOSE
from keystage.wire.bearer import SCHEME, Bearer, bearer_from, bearer_of
from keystage.wire.secret import read_secret

MAX_ANSWER_BYTES = 32 << 20
"""A status of a node with a thousand holders takes half a MiB."""
POOLS = 256
"""Peers whose connections are kept."""


class NotAnswered(Exception):
    """No answer, or not the one that was expected.

    Attributes:
        status: HTTP status, 0 where there was none.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def internal_token(wire_key_file: Path) -> str:
    """The bearer token of Keystage's pods among each other.

    Raises:
        WireError: the file cannot be used.
    """
    return read_secret(wire_key_file).derive(TOKEN_PURPOSE).hex()


def internal_bearer(wire_key_file: Path) -> Bearer:
    """The same, for as long as a process runs: the secret may be replaced meanwhile.

    Raises:
        WireError: the file cannot be used.
    """
    return bearer_from(None, wire_key_file)


class Asking:
    """Asks pods.

    Args:
        token: bearer token of every request.
    """

    def __init__(self, token: Bearer | str) -> None:
        self._bearer = bearer_of(token)
        self._pools = urllib3.PoolManager(num_pools=POOLS, maxsize=2, block=False, retries=False)

    def close(self) -> None:
        """Closes idle connections."""
        self._pools.clear()

    def ask(
        self, method: str, address: str, path: str, *, body: bytes | None = None, timeout_s: float = 1.0
    ) -> bytes:
        """One exchange.

        Args:
            method: HTTP method.
            address: `host:port`.
            path: absolute path.
            body: JSON, or None.
            timeout_s: bound of connecting, and of each silence of the answer.

        Raises:
            NotAnswered: no answer in time, or a status of 300 and more.
        """
        what = f"{method} http://{address}{path}"
        headers = {"Authorization": f"{SCHEME}{self._bearer.current}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            answer = self._pools.request(
                method,
                f"http://{address}{path}",
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
                redirect=False,
                preload_content=False,
                decode_content=False,  # nobody here asks for another coding
            )
            try:
                data = answer.read(MAX_ANSWER_BYTES + 1)
            finally:
                answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
            raise NotAnswered(f"{what}: {_words(error)}") from error
        if len(data) > MAX_ANSWER_BYTES:
            raise NotAnswered(f"{what}: the answer exceeds {MAX_ANSWER_BYTES} bytes")
        if answer.status >= http.client.MULTIPLE_CHOICES:
            text = " ".join(data[:200].decode("utf-8", "replace").split())
            raise NotAnswered(f"{what} answered {answer.status}: {text}", answer.status)
        return data


def _words(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    return str(cause) or type(cause).__name__

"""What the cluster asks a gateway: whether it lives, whether requests may come, and what it has in hand.

Before it: the kubelet's probes, and the controller, which scales plain functions by loads and lets replicas
that leave finish. Served beside the management API, whose credentials the controller does not have: loads are
told to who bears the deployment's internal token. It must not ask the API server anything.

    GET /livez     200: it answers
    GET /readyz    200: its view is fresh; 503: it is too old, or the gateway is leaving
    GET /_/loads   list of [function, Load], as they are at this moment
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec

from keystage.gateway.backend import STALE_S, Backend
from keystage.gateway.incoming import Receive
from keystage.gateway.proxy import Scope, Send
from keystage.kubernetes.api import LOADS_PATH
from keystage.local.api import Load

LIVE = "/livez"
READY = "/readyz"
PREFIXES = (LIVE.encode(), READY.encode(), LOADS_PATH.encode())
_TEXT = b"text/plain; charset=utf-8"
Answer = tuple[int, bytes, bytes]
"""Status, content type, body."""


class Internal:
    """Answers them.

    Args:
        backend: whose view's age counts.
        loads: what is in hand now.
        token: who bears it may read loads.
        is_leaving: whether the gateway was told to stop.
    """

    def __init__(
        self,
        backend: Backend,
        loads: Callable[[], list[tuple[str, Load]]],
        token: str,
        is_leaving: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._loads = loads
        self._bearer = f"Bearer {token}".encode()
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        status, media, body = self._answer(scope)
        headers = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        content = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": content, "more_body": False})

    def _answer(self, scope: Scope) -> Answer:
        path = scope["path"]
        if path not in (LIVE, READY, LOADS_PATH):
            return 404, _TEXT, b"no such path\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, _TEXT, f"{path} takes GET, HEAD\n".encode()
        if path == LIVE:
            return 200, _TEXT, b"ok\n"
        return self._readiness() if path == READY else self._told(scope)

    def _readiness(self) -> Answer:
        if self._is_leaving():
            return 503, _TEXT, b"the gateway is leaving\n"
        age_s = self._backend.view_age_s()
        if age_s > STALE_S:
            why = (
                f"the view of functions and replicas is {age_s:.0f} s old, at most {STALE_S:.0f} s are well\n"
            )
            return 503, _TEXT, why.encode()
        return 200, _TEXT, b"ok\n"

    def _told(self, scope: Scope) -> Answer:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._bearer):
            return 401, _TEXT, b"the internal token is missing or wrong\n"
        return 200, b"application/json", msgspec.json.encode(self._loads())

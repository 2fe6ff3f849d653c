"""What the cluster asks and tells a gateway: does it live, may requests come, what is in hand, the report.

Before it: the kubelet's probes, and the controller, which scales plain functions by loads, lets replicas
that leave finish, and reports what it does. Served beside the management API, whose credentials the
controller does not have: loads and the report are exchanged with who bears the deployment's internal
token. It must not ask the API server anything.

    GET /livez     200: it answers
    GET /readyz    200: its view is fresh; 503: it is too old, or the gateway is leaving
    GET /_/loads   list of [function, Load], as they are at this moment
    PUT /_/report  an `observability.api.Report`: kept if it is the newest
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from keystage.gateway.backend import STALE_S, Backend
from keystage.gateway.incoming import Receive
from keystage.gateway.proxy import Scope, Send
from keystage.kubernetes.api import LOADS_PATH, REPORT_PATH
from keystage.local.api import Load
from keystage.observability.board import MAX_REPORT_BYTES, Board, NoReport
from keystage.wire.bearer import Bearer, bearer_of

LIVE = "/livez"
READY = "/readyz"
PREFIXES = (LIVE.encode(), READY.encode(), LOADS_PATH.encode(), REPORT_PATH.encode())
_TEXT = b"text/plain; charset=utf-8"
Answer = tuple[int, bytes, bytes]
"""Status, content type, body."""
_UNKNOWN: Answer = (401, _TEXT, b"the internal token is missing or wrong\n")


class Internal:
    """Answers them.

    Args:
        backend: whose view's age counts.
        loads: what is in hand now.
        reports: takes the controller's reports.
        token: who bears it may read loads and tell reports.
        is_leaving: whether the gateway was told to stop.
    """

    def __init__(
        self,
        backend: Backend,
        loads: Callable[[], list[tuple[str, Load]]],
        reports: Board,
        token: Bearer | str,
        is_leaving: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._loads = loads
        self._reports = reports
        self._bearer = bearer_of(token)
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["path"] == REPORT_PATH:
            status, media, body = await self._taken(scope, receive)
        else:
            status, media, body = self._answer(scope)
        headers = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"PUT" if scope["path"] == REPORT_PATH else b"GET, HEAD"))
        if status == 413:  # what is left of it is not read
            headers.append((b"connection", b"close"))
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
        if not self._is_known(scope):
            return _UNKNOWN
        return 200, b"application/json", msgspec.json.encode(self._loads())

    async def _taken(self, scope: Scope, receive: Receive) -> Answer:
        if scope["method"] != "PUT":
            return 405, _TEXT, f"{REPORT_PATH} takes PUT\n".encode()
        if not self._is_known(scope):
            return _UNKNOWN
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return 400, _TEXT, b"the report broke off\n"
            body += message.get("body", b"")
            if len(body) > MAX_REPORT_BYTES:
                return 413, _TEXT, f"a report has {MAX_REPORT_BYTES} bytes at most\n".encode()
            if not message.get("more_body", False):
                break
        try:
            self._reports.put(bytes(body))
        except NoReport as error:
            return 400, _TEXT, f"{error}\n".encode()
        return 200, _TEXT, b"ok\n"

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._bearer.admits(given)

"""The HTTP face of a stage pod, from before its imports until its end: one port, whoever it is by now.

    parked: /_/health and /_/ready 200, POST /_/activate      (`pod` waits for it on the main thread)
    worker: everything is answered by `worker.http`, activations are refused (409)

Served from a thread by `worker.http.serve`. While a parked pod becomes a worker it stays ready: it is
routed to only once whoever activated it has its answer, and a probe must not flip in between. This module
must not know how a pod becomes a worker.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from keystage.keysmanager.pod_api import ACTIVATE_PATH, Activated, Activation
from keystage.wire.bearer import Bearer, bearer_of
from keystage.wire.starts import START_PATH, StartReport
from keystage.wire.unreadable import UNREADABLE
from keystage.worker.config import parse_stages
from keystage.worker.http import JSON, METRICS, TEXT, WorkerHttp, answer, read_body
from keystage.worker.settings import Status
from keystage.worker.states import is_alive, is_ready

MAX_BODY_BYTES = 256 * 1024
"""An environment of a hundred variables takes a tenth of it."""
FLUSH_S = 1.0
"""Longest wait of a pod that ends for its last answer to be on its way."""
_PREFIX = "KEYSTAGE_"


class NotActivated(Exception):
    """An activation that did not lead to a worker; the worker's own reason."""


class PodFace:
    """A bare ASGI application; implements `worker.supply.Front`.

    Args:
        token: of activations; empty: the pod is no parked one.
    """

    def __init__(self, token: Bearer | str) -> None:
        self._bearer = bearer_of(token)
        self._is_parked_one = bool(self._bearer.current)
        self._worker: WorkerHttp | None = None
        self._status: Status | None = None
        self._is_prepared = not self._is_parked_one
        self._is_taken = False
        self._wanted: Future[Activation] = Future()
        self._outcome: Future[Activated] = Future()
        self._told = threading.Event()

    # ------------------------------------------------------------ the main thread

    def prepared(self) -> None:
        """A parked pod can be activated at once."""
        self._is_prepared = True

    def wait(self) -> Activation:
        """Blocks until an activation comes."""
        return self._wanted.result()

    def phases(self, offset_s: float) -> dict[str, float]:
        """Phases of the worker's start that are reached; `offset_s` is added to monotonic times."""
        reached = {} if self._status is None else dict(self._status.start)
        return {phase: at_s + offset_s for phase, at_s in reached.items()}

    def activated(self, answer: Activated) -> None:
        """The worker is ready."""
        if not self._outcome.done():
            self._outcome.set_result(answer)

    def show(self, face: WorkerHttp, status: Status) -> None:
        """See `Front.show`."""
        self._worker, self._status = face, status

    def failed(self, reason: str) -> None:
        """See `Front.failed`; waits until who activated the pod has heard of it."""
        if self._outcome.done():
            return
        self._outcome.set_exception(NotActivated(reason))
        if self._is_taken:
            self._told.wait(FLUSH_S)

    # ------------------------------------------------------------ HTTP

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            return
        path, worker, status = scope["path"], self._worker, self._status
        is_becoming = status is not None and is_alive(status.state) and not is_ready(status.state)
        if path == ACTIVATE_PATH:
            code, body = await self._activate(scope, receive)
        elif path == "/_/ready" and self._is_parked_one and is_becoming and not self._outcome.done():
            code, body = 200, _json(parked=True, activating=True)
        elif worker is not None:
            await worker(scope, receive, send)
            return
        else:
            code, body = self._parked(path)
        kind = METRICS if path == "/metrics" else JSON if body.startswith(b"{") else TEXT
        await answer(send, code, body, kind)
        if path == ACTIVATE_PATH and self._outcome.done():
            self._told.set()

    def _parked(self, path: str) -> tuple[int, bytes]:
        """Answers of a pod that is no worker yet."""
        if path == "/_/health":
            return 200, b"parked" if self._is_parked_one else b"loading"
        if path == "/_/ready":
            if self._is_parked_one and self._is_prepared:
                return 200, _json(parked=True)
            return 503, b"preparing" if self._is_parked_one else b"loading"
        if path == START_PATH:
            return 200, msgspec.json.encode(StartReport())
        if path == "/metrics":
            return 200, b""
        return (503, b"no worker yet\n") if path == "/" else (404, f"no such path: {path}\n".encode())

    async def _activate(self, scope: dict[str, Any], receive: Any) -> tuple[int, bytes]:
        if not self._is_parked_one:
            return 404, b"this pod was never parked\n"
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        if not self._bearer.admits(given):
            return 401, b"a bearer token that is not this deployment's\n"
        if scope["method"] != "POST":
            return 405, b"POST an activation\n"
        body = await read_body(receive, MAX_BODY_BYTES)
        if not isinstance(body, bytes):
            return body
        try:
            wanted = msgspec.json.decode(body, type=Activation)
            _check(wanted)
        except (ValueError, *UNREADABLE) as error:
            return 400, f"no activation: {error}\n".encode()
        if self._is_taken:
            return 409, b"activated before: a pod becomes one worker\n"
        self._is_taken = True
        self._wanted.set_result(wanted)
        try:
            # Shielded: who hangs up does not call off what has begun.
            activated = await asyncio.shield(asyncio.wrap_future(self._outcome))
        except NotActivated as error:
            return 500, f"{error}\n".encode()
        return 200, msgspec.json.encode(activated)


def _check(wanted: Activation) -> None:
    """Refuses what can never become a worker.

    Raises:
        ValueError: a variable of another kind, or one that is missing; names it.
    """
    for name, value in wanted.env.items():
        if not name.startswith(_PREFIX) or "=" in name or "\0" in name + value:
            raise ValueError(f"variable {name[:100]!r}: {_PREFIX}* without NUL is expected")
    parse_stages(wanted.env.get("KEYSTAGE_STAGES", ""))


def _json(**fields: bool) -> bytes:
    return msgspec.json.encode(fields)

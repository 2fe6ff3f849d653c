"""The worker's HTTP face: alive, ready, metrics, and one stage alone. A thread beside the engine.

`/_/health` is 200 in all states but `failed`, and while the engine loop beats; `/_/ready` is 200
only in `ready`, that is when weights are resident and a warm-up ran. `POST /` takes and answers
safetensors.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import uvicorn

from keystage.wire.bearer import Bearer, bearer_of
from keystage.wire.http_protocol import PassingProtocol
from keystage.wire.metrics import Sample, expose
from keystage.wire.starts import START_PATH, StartReport
from keystage.wire.threads import MAX_THREADS, THREADS_PATH, Threads
from keystage.wire.unreadable import UNREADABLE
from keystage.worker.executor import StageError
from keystage.worker.settings import Status
from keystage.worker.states import is_alive, is_ready

BEAT_LIMIT_S = 30.0
"""An engine loop silent for this long hangs; one CPU wave or batch takes far less."""
MAX_BODY_BYTES = 256 * 1024 * 1024
CALL_TIMEOUT_S = 120.0
MAX_THREADS_BODY_BYTES = 1024
TEXT, JSON, TENSORS = b"text/plain; charset=utf-8", b"application/json", b"application/octet-stream"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"


Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
"""What is served: ASGI."""


class WorkerHttp:
    """A bare ASGI application over the worker's status.

    Args:
        status: shared with the engine.
        pipeline: label of the metrics.
        replica: label of the metrics.
        bearer: who may change threads; None: nobody.
    """

    def __init__(self, status: Status, pipeline: str, replica: str, bearer: Bearer | None = None) -> None:
        self._status = status
        self._bearer = bearer or bearer_of("")
        self._labels = {"pipeline": pipeline, "replica": replica}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        status, body, kind = 404, f"no such path: {path}\n".encode(), TEXT
        if path == "/_/health":
            status, body = self._health()
        elif path == "/_/ready":
            state = self._status.state
            status, body = (200 if is_ready(state) else 503), state.value.encode()
        elif path == THREADS_PATH:
            status, body = await self._threads(scope, receive)
            kind = JSON if status == 200 else TEXT
        elif path == START_PATH:
            status, body, kind = 200, msgspec.json.encode(self._start()), JSON
        elif path == "/metrics":
            status, body, kind = 200, expose(self._samples()), METRICS
        elif path == "/":
            if method == "POST":
                status, body = await self._single(receive)
                kind = TENSORS if status == 200 else TEXT
            else:
                status, body = 405, b"POST a safetensors body\n"
        await answer(send, status, body, kind)

    def _health(self) -> tuple[int, bytes]:
        status = self._status
        if not is_alive(status.state):
            return 503, f"failed: {status.reason}\n".encode()
        silent_s = time.monotonic() - status.beat_s
        if status.beat_s and silent_s > BEAT_LIMIT_S:
            return 503, f"engine loop silent for {silent_s:.1f} s (bound {BEAT_LIMIT_S:.0f} s)\n".encode()
        return 200, status.state.value.encode()

    def _start(self) -> StartReport:
        status = self._status
        firsts = [use.first_at_s for use in list(status.use.values()) if use.batches]
        phases = {f"{phase}_s": at_s for phase, at_s in list(status.start.items())}
        return StartReport(**phases, first_item_s=min(firsts, default=0.0))

    async def _threads(self, scope: dict[str, Any], receive: Any) -> tuple[int, bytes]:
        """GET: compute threads at present; PUT: others from the next batch on."""
        method = scope["method"]
        if method == "PUT":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not self._bearer.admits(given):
                return 401, b"the internal token is missing or wrong\n"
            read = await read_body(receive, MAX_THREADS_BODY_BYTES)
            if not isinstance(read, bytes):
                return read
            try:
                threads = msgspec.json.decode(read, type=Threads).threads
            except UNREADABLE as error:
                return 400, f'expected {{"threads": 1..{MAX_THREADS}}}: {error}\n'.encode()
            self._status.threads_wanted = threads
            return 202, b""
        if method == "GET":
            return 200, msgspec.json.encode({"threads": self._status.threads})
        return 405, b"GET or PUT\n"

    async def _single(self, receive: Any) -> tuple[int, bytes]:
        if not is_ready(self._status.state):
            return 503, f"worker is {self._status.state.value}\n".encode()
        read = await read_body(receive, MAX_BODY_BYTES)
        if not isinstance(read, bytes):
            return read
        result: Future[bytes] = Future()
        try:
            self._status.calls.put_nowait((read, result))
        except queue.Full:
            return 429, b"64 calls wait already\n"
        try:
            return 200, await asyncio.wait_for(asyncio.wrap_future(result), CALL_TIMEOUT_S)
        except StageError as error:
            return 400, f"{error}\n".encode()
        except TimeoutError:
            return 504, f"no answer within {CALL_TIMEOUT_S:.0f} s\n".encode()

    def _samples(self) -> list[Sample]:
        status, labels = self._status, self._labels
        samples = [
            Sample("keystage_worker_sessions", labels, status.held),
            Sample("keystage_worker_kv_tokens", labels, status.reserved),
            Sample("keystage_preemptions", labels, status.preemptions),
            Sample("keystage_worker_corrupt_tensors", labels, status.corrupt),
        ]
        for stage, use in list(status.use.items()):  # the engine's thread adds to it
            by_stage = {**labels, "stage": str(stage)}
            samples += [
                Sample("keystage_stage_busy_seconds", by_stage, use.busy_s),
                Sample("keystage_stage_batches", by_stage, use.batches),
                Sample("keystage_stage_rows", by_stage, use.rows),
                Sample("keystage_stage_wave_wait_seconds", by_stage, use.wave_wait_s),
                Sample("keystage_stage_kv_blocks", by_stage, status.kv_blocks),
                Sample("keystage_stage_kv_blocks_used", by_stage, status.kv_blocks_used),
            ]
        return samples


async def answer(send: Any, status: int, body: bytes, kind: bytes = TEXT) -> None:
    """Sends a whole answer; Prometheus takes none whose content type is not told."""
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Any, most_bytes: int) -> bytes | tuple[int, bytes]:
    """The whole body, or status and text of the refusal."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return 499, b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            return 413, f"body exceeds {most_bytes} bytes\n".encode()
        if not message.get("more_body"):
            return b"".join(parts)


def serve(app: Application, listening: socket.socket) -> threading.Thread:
    """Runs the application in a daemon thread until the process ends."""
    config = uvicorn.Config(
        app,
        http=PassingProtocol,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=130,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True)
    thread.start()
    return thread

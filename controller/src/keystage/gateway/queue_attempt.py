"""One attempt at an asynchronous call: finds a replica, sends the request, reads the answer.

Called by `gateway.queue_runner`. It wakes functions at zero like any request does, and counts in the
gateway's invocation metrics. Another replica is tried within the attempt only while nothing of the request
can have reached the first; everything else that fails is the runner's to try again. It must not know queues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time

from keystage.gateway.backend import Endpoint, GatewayError
from keystage.gateway.headers import for_client
from keystage.gateway.metrics import CLIENT_GONE, Metrics
from keystage.gateway.queue import Call
from keystage.gateway.replicas import Replicas
from keystage.gateway.upstream import NotConnected, Pool, Unsendable, request_head, send_whole
from keystage.gateway.upstream_answer import UpstreamError
from keystage.gateway.upstream_connection import UpstreamSilence

_TEXT = "text/plain; charset=utf-8"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: the function's own, or the one that stands for why there is none to pass on.
        content_type: of `body`, empty if the function named none.
        body: the answer, or why there is none in words.
        is_answer: whether the function answered.
        seconds: the attempt's length.
        retry_after_s: the function's own wish, 0 without.
        dropped_status: the function's own where its answer is not passed on and `status` says so, else 0.
    """

    status: int
    content_type: str
    body: bytes
    is_answer: bool
    seconds: float = 0.0
    retry_after_s: float = 0.0
    dropped_status: int = 0

    @property
    def own_status(self) -> int:
        """The function's own if it answered: it is counted, and decides whether the call is tried again."""
        return self.dropped_status or self.status


class Attempts:
    """Tries calls.

    Args:
        replicas: where to send.
        metrics: counts invocations.
        timeout_s: seconds from the request's sending to the answer's end.
        answer_bytes: largest answer that is passed on to a callback.
    """

    def __init__(self, replicas: Replicas, metrics: Metrics, *, timeout_s: float, answer_bytes: int) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._answer_bytes = answer_bytes
        self._pool = Pool(timeout_s)

    async def start(self) -> None:
        """Opens the connection pool."""
        await self._pool.start()

    async def stop(self) -> None:
        """Closes the connection pool."""
        await self._pool.stop()

    async def run(self, call: Call) -> Outcome:
        """Tries once; every failure is an outcome.

        Raises:
            Unsendable: no replica can be asked this.
        """
        started_s = time.monotonic()
        try:
            self._replicas.check(call.function)
        except GatewayError as error:
            # Removed, or just being deployed anew: a later attempt may find it.
            return _failed(error.status, str(error))
        self._metrics.begin(call.function)
        outcome = _failed(CLIENT_GONE, "the attempt was broken off")
        try:
            outcome = await self._pass(call, started_s)
        finally:
            seconds = time.monotonic() - started_s
            self._metrics.end(call.function, outcome.own_status, seconds)
        return dataclasses.replace(outcome, seconds=seconds)

    async def _pass(self, call: Call, started_s: float) -> Outcome:
        refused: set[str] = set()
        while True:
            try:
                endpoint = await self._replicas.acquire(call.function, started_s, refused)
            except GatewayError as error:
                return _failed(error.status, str(error))
            who = f"function {call.function}: replica {endpoint.replica}"
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._exchange(call, endpoint)
            except Unsendable:
                raise
            except NotConnected:
                refused.add(endpoint.replica)
            except (TimeoutError, UpstreamSilence):
                return _failed(504, f"{who} did not answer within {self._timeout_s:g} s")
            except UpstreamError as error:
                self._replicas.suspect(endpoint)
                return _failed(502, f"{who} {error}")
            finally:
                self._replicas.release(endpoint)

    async def _exchange(self, call: Call, endpoint: Endpoint) -> Outcome:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers]
        target = call.path.encode("latin-1")
        head = request_head("POST", target, endpoint.address, headers, len(call.body))
        connection = await self._pool.acquire(endpoint.address)
        try:
            send_whole(connection, "POST", head, call.body)
            await connection.head()
            answer = connection.answer
            parts: list[bytes] = []
            size = 0
            is_last = False
            while not is_last:
                chunk = await connection.read()
                is_last = answer.is_complete
                size += len(chunk)
                if call.callback and size <= self._answer_bytes:
                    parts.append(chunk)
        finally:
            self._pool.release(connection)
        told = dict(for_client(answer.headers))
        outcome = Outcome(
            answer.status,
            told.get(b"content-type", b"").decode("latin-1"),
            b"".join(parts),
            is_answer=True,
            retry_after_s=_seconds(told.get(b"retry-after", b"").decode("latin-1")),
        )
        if call.callback and size > self._answer_bytes:
            return self._without_body(call, outcome, size)
        return outcome

    def _without_body(self, call: Call, outcome: Outcome, size_bytes: int) -> Outcome:
        """The function did its work; its answer is too large for the callback, which is told so instead."""
        text = (
            f"the answer has {size_bytes} bytes, at most {self._answer_bytes} are passed to a callback "
            "(KEYSTAGE_ASYNC_ANSWER_BYTES)"
        )
        _log.warning(
            "function %s: call %r answered with status %d; its body is dropped: %s",
            call.function,
            call.id,
            outcome.status,
            text,
        )
        return dataclasses.replace(
            outcome,
            status=502,
            content_type=_TEXT,
            body=f"{text}\n".encode(),
            dropped_status=outcome.status,
        )


def _failed(status: int, text: str) -> Outcome:
    return Outcome(status, _TEXT, f"{text}\n".encode(), is_answer=False)


def _seconds(retry_after: str) -> float:
    value = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    return value if math.isfinite(value) else 0.0

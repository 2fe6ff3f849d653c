"""One attempt at an asynchronous call: finds a replica, sends the request, reads the answer.

Called by `gateway.queue_runner`. It wakes functions at zero like any request does, and counts in the
gateway's invocation metrics. Another replica is tried within the attempt only while nothing of the request
can have reached the first; everything else that fails is the runner's to try again. It must not know queues.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time

import aiohttp
import yarl

from keystage.gateway.backend import Endpoint, GatewayError
from keystage.gateway.metrics import Metrics
from keystage.gateway.queue import Call
from keystage.gateway.replicas import Replicas

CONNECT_S = 5.0
POOL_IDLE_S = 3.0
"""Shorter than any server's keep-alive (uvicorn: 5 s), so that it is us who close idle connections."""
_SKIPPED = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})
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
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Opens the connection pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIPPED,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )
        # Every further sending is an attempt that is counted, so never one by the client itself.
        self._session._retry_connection = False  # noqa: SLF001  (there is no public switch)

    async def stop(self) -> None:
        """Closes the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def run(self, call: Call) -> Outcome:
        """Tries once; every failure is an outcome."""
        started_s = time.monotonic()
        try:
            self._replicas.check(call.function)
        except GatewayError as error:
            # Removed, or just being deployed anew: a later attempt may find it.
            return _failed(error.status, str(error))
        self._metrics.begin(call.function)
        outcome = _failed(499, "the attempt was broken off")
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
                return await self._exchange(call, endpoint)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                refused.add(endpoint.replica)
            except TimeoutError:
                return _failed(504, f"{who} did not answer within {self._timeout_s:g} s")
            except (aiohttp.ClientError, OSError):
                return _failed(502, f"{who} broke the connection before its answer was complete")
            finally:
                self._replicas.release(endpoint)

    async def _exchange(self, call: Call, endpoint: Endpoint) -> Outcome:
        assert self._session is not None, "start() comes first"
        url = yarl.URL(f"http://{endpoint.address}{call.path}", encoded=True)
        async with self._session.post(
            url, headers=call.headers, data=call.body, allow_redirects=False
        ) as answer:
            parts: list[bytes] = []
            size = 0
            async for chunk in answer.content.iter_any():
                size += len(chunk)
                if call.callback and size <= self._answer_bytes:
                    parts.append(chunk)
            outcome = Outcome(
                answer.status,
                answer.headers.get("content-type", ""),
                b"".join(parts),
                is_answer=True,
                retry_after_s=_seconds(answer.headers.get("retry-after", "")),
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

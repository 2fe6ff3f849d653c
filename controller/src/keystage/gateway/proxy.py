"""`/function/{name}[/...]`: passes a request to a replica and its answer back, as both come.

The hot path of the gateway, so a bare ASGI handler: any method, any path and query, bodies and
answers streamed in both directions whatever the Accept header says. Before it: uvicorn parses
HTTP. After it: a pooled HTTP client. A request is sent to a second replica only if nothing of it
can have reached the first. It must not look into bodies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import yarl

from keystage.gateway.backend import Endpoint, GatewayError
from keystage.gateway.headers import end_to_end, for_upstream
from keystage.gateway.incoming import Incoming, Receive
from keystage.gateway.metrics import Metrics
from keystage.gateway.names import function_name
from keystage.gateway.replicas import RETRY_AFTER_S, Replicas

PREFIX = b"/function/"
CONNECT_S = 5.0
POOL_IDLE_S = 3.0
"""Shorter than any server's keep-alive (uvicorn: 5 s), so that it is us who close idle connections."""
CLIENT_GONE = 499
READ_BUFFER_BYTES = 1 << 18
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_SKIPPED = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})
_log = logging.getLogger(__name__)


class UpstreamFailed(GatewayError):
    """The replica broke the connection, or sent what is no HTTP, before its answer began."""

    status = 502


class UpstreamSilent(GatewayError):
    """The replica sent nothing for too long."""

    status = 504


@dataclasses.dataclass(slots=True)
class _Call:
    """One invocation on its way."""

    function: str
    path: str
    method: str
    headers: list[tuple[str, str]]
    incoming: Incoming
    body: bytes | AsyncIterator[bytes] | None
    started_s: float
    id_headers: list[tuple[bytes, bytes]]
    status: int = 0
    """Status sent to the client, 0 before."""


class Proxy:
    """ASGI application for paths under `/function/`.

    Args:
        replicas: where to send.
        metrics: counts invocations.
        max_body_bytes: bound of a request's body.
        upstream_s: seconds without a byte from a replica before it is given up.
    """

    def __init__(
        self, replicas: Replicas, metrics: Metrics, *, max_body_bytes: int, upstream_s: float
    ) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._upstream_s = upstream_s
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Opens the connection pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._upstream_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIPPED,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )
        # By itself the client sends a GET again on a new connection when a kept one breaks; the
        # replica may have begun with it, and may have died of it.
        self._session._retry_connection = False  # noqa: SLF001  (there is no public switch)

    async def stop(self) -> None:
        """Closes the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one invocation."""
        incoming = Incoming(receive, self._max_body_bytes)
        call = _begin(scope, incoming)
        counted = False
        try:
            call.function = function_name(call.function)
            self._replicas.check(call.function)
            self._metrics.begin(call.function)
            counted = True
            call.body = await incoming.begin(_declared_bytes(scope))
            await self._pass(call, send)
        except GatewayError as error:
            await _refuse(call, send, error)
        except asyncio.CancelledError:
            if not incoming.gone:
                raise
            call.status = CLIENT_GONE
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        finally:
            incoming.close()
            if counted:
                self._metrics.end(call.function, call.status, time.monotonic() - call.started_s)

    async def _pass(self, call: _Call, send: Send) -> None:
        refused: set[str] = set()
        while True:
            endpoint = await self._replicas.acquire(call.function, call.started_s, refused)
            try:
                await self._exchange(call, endpoint, send)
                return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # No connection, so nothing was sent: another replica may have it.
                _log.info("%s refused a connection: %s", endpoint.replica, error)
                refused.add(endpoint.replica)
                if isinstance(call.body, AsyncIterator):
                    call.body = call.incoming.again()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._judge(call, endpoint, error)
                return
            finally:
                self._replicas.release(endpoint)

    def _judge(self, call: _Call, endpoint: Endpoint, error: Exception) -> None:
        """Turns a failed exchange into a refusal; an answer that has begun can only be broken off."""
        if call.incoming.error is not None and not call.status:
            raise call.incoming.error
        if call.status:
            _log.warning("%s broke off its answer: %r", endpoint.replica, error)
            return
        who = f"function {call.function}: replica {endpoint.replica}"
        if isinstance(error, TimeoutError):
            raise UpstreamSilent(f"{who} sent nothing for {self._upstream_s:g} s") from error
        raise UpstreamFailed(f"{who} broke the connection before it answered") from error

    async def _exchange(self, call: _Call, endpoint: Endpoint, send: Send) -> None:
        assert self._session is not None, "start() comes first"
        url = yarl.URL(f"http://{endpoint.address}{call.path}", encoded=True)
        async with self._session.request(
            call.method, url, headers=call.headers, data=call.body, allow_redirects=False
        ) as answer:
            headers = end_to_end(answer.raw_headers)
            headers += call.id_headers
            call.status = answer.status
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            content = answer.content
            last = False
            while not last:
                chunk = await content.readany()
                last = content.at_eof()
                if last:
                    call.incoming.close()
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})


def _begin(scope: Scope, incoming: Incoming) -> _Call:
    raw: bytes = scope["raw_path"]
    name, slash, rest = raw[len(PREFIX) :].partition(b"/")
    path = (slash + rest).decode("latin-1") or "/"
    query: bytes = scope["query_string"]
    if query:
        path += "?" + query.decode("latin-1")
    client = scope.get("client") or ("", 0)
    headers = for_upstream(scope["headers"], client=client[0], scheme=scope["scheme"])
    call_id = b""
    for key, value in scope["headers"]:
        if key == b"x-call-id":
            call_id = value
    if not call_id:
        call_id = uuid.uuid4().hex.encode()
        headers.append(("x-call-id", call_id.decode()))
    start = str(time.time_ns())
    headers.append(("x-start-time", start))
    return _Call(
        function=name.decode("latin-1"),
        path=path,
        method=scope["method"],
        headers=headers,
        incoming=incoming,
        body=None,
        started_s=time.monotonic(),
        id_headers=[(b"x-call-id", call_id), (b"x-start-time", start.encode())],
    )


def _declared_bytes(scope: Scope) -> int | None:
    for key, value in scope["headers"]:
        if key == b"content-length":
            return int(value)
    return None


async def _refuse(call: _Call, send: Send, error: GatewayError) -> None:
    call.status = error.status
    body = f"{error}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *call.id_headers,
    ]
    if error.status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

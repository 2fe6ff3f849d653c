"""`/function/{name}[/...]`: passes a request to a replica and its answer back, as both come.

The hot path of the gateway, so a bare ASGI handler: any method, any path and query, bodies and
answers streamed in both directions whatever the Accept header says. Before it: uvicorn parses
HTTP. After it: kept connections to replicas (`gateway.upstream`). A request is sent to a second
replica only if nothing of it can have reached the first. It must not look into bodies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from keystage.gateway.backend import Endpoint, GatewayError
from keystage.gateway.call_headers import identity, of_refusal
from keystage.gateway.headers import SERVED_BY, for_client, for_replica
from keystage.gateway.incoming import Incoming, Receive
from keystage.gateway.metrics import CLIENT_GONE, Metrics
from keystage.gateway.names import function_name
from keystage.gateway.replicas import Replicas
from keystage.gateway.traces import RESPONSE, Invocation, handed_on
from keystage.gateway.upstream import NotConnected, Pool, request_head, send_whole
from keystage.gateway.upstream_answer import UpstreamBroken, UpstreamError
from keystage.gateway.upstream_connection import Connection, UpstreamSilence
from keystage.wire.tracing import Tracer

PREFIX = b"/function/"
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
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
    target: bytes
    method: str
    headers: list[tuple[bytes, bytes]]
    incoming: Incoming
    declared_bytes: int | None
    body: bytes | AsyncIterator[bytes] | None
    started_s: float
    id_headers: list[tuple[bytes, bytes]]
    invocation: Invocation | None = None
    status: int = 0
    """Status sent to the client, 0 before."""


class Proxy:
    """ASGI application for paths under `/function/`.

    Args:
        replicas: where to send.
        metrics: counts invocations.
        max_body_bytes: bound of a request's body.
        upstream_s: seconds without a byte from a replica before it is given up.
        tracer: sends the spans of invocations, None: they are not traced.
    """

    def __init__(
        self,
        replicas: Replicas,
        metrics: Metrics,
        *,
        max_body_bytes: int,
        upstream_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        self._replicas = replicas
        self._tracer = tracer
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._pool = Pool(upstream_s)

    async def start(self) -> None:
        """Opens the connection pool."""
        await self._pool.start()

    async def stop(self) -> None:
        """Closes the connection pool."""
        await self._pool.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one invocation."""
        incoming = Incoming(receive, self._max_body_bytes)
        call = _begin(scope, incoming)
        if self._tracer is not None:
            _trace(call, self._tracer, scope)
        counted = False
        try:
            call.function = function_name(call.function)
            self._replicas.check(call.function)
            self._metrics.begin(call.function)
            counted = True
            call.body = await incoming.begin(call.declared_bytes)
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
            trace_id = call.invocation.trace_id if call.invocation is not None else ""
            if counted:
                self._metrics.end(call.function, call.status, time.monotonic() - call.started_s, trace_id)
            if call.invocation is not None:
                call.invocation.end(call.function if counted else "", call.status)

    async def _pass(self, call: _Call, send: Send) -> None:
        refused: set[str] = set()
        while True:
            endpoint = await self._replicas.acquire(call.function, call.started_s, refused)
            if call.invocation is not None:
                call.invocation.acquired(endpoint.replica)
            try:
                await self._exchange(call, endpoint, send)
                return
            except NotConnected as error:
                # Nothing was sent: another replica may have it.
                _log.info("%s %s", endpoint.replica, error)
                refused.add(endpoint.replica)
            except (UpstreamError, GatewayError) as error:
                if isinstance(error, UpstreamBroken):
                    self._replicas.suspect(endpoint)
                _judge(call, endpoint, error)
                return
            finally:
                self._replicas.release(endpoint)

    async def _exchange(self, call: _Call, endpoint: Endpoint, send: Send) -> None:
        connection = await self._pool.acquire(endpoint.address)
        upload = None
        try:
            upload = await _begin_exchange(call, endpoint, connection)
            await connection.head()
            answer = connection.answer
            call.status = status = answer.status
            headers = for_client(answer.headers)
            if status in (204, 304):
                headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers += call.id_headers
            await send({"type": "http.response.start", "status": status, "headers": headers})
            last = False
            while not last:
                chunk = await connection.read()
                last = answer.is_complete
                if last:
                    call.incoming.close()
                await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        finally:
            if upload is not None:
                upload.cancel()
            self._pool.release(connection)


async def _begin_exchange(
    call: _Call, endpoint: Endpoint, connection: Connection
) -> asyncio.Task[None] | None:
    """Sends the request, or what is here of it; the task sends the rest."""
    if call.incoming.gone:
        await asyncio.sleep(0)  # ends here, cancelled: half a request must not look like a whole one
    body = call.body
    if isinstance(body, AsyncIterator):
        head = request_head(call.method, call.target, endpoint.address, call.headers, call.declared_bytes)
        connection.begin(call.method, head, is_whole=False)
        return asyncio.get_running_loop().create_task(_upload(call, body, connection))
    head = request_head(call.method, call.target, endpoint.address, call.headers, len(body or b""))
    send_whole(connection, call.method, head, body or b"")
    return None


async def _upload(call: _Call, body: AsyncIterator[bytes], connection: Connection) -> None:
    is_chunked = call.declared_bytes is None
    try:
        async for part in body:
            if part:
                connection.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
                await connection.drain()
        if not call.incoming.gone:
            if is_chunked:
                connection.write(b"0\r\n\r\n")
            connection.end()
    except Exception as error:  # noqa: BLE001  whoever waits for the answer is told, whatever it is
        connection.fail(error)


def _judge(call: _Call, endpoint: Endpoint, error: Exception) -> None:
    """Turns a failed exchange into a refusal; an answer that has begun can only be broken off."""
    if call.status:
        _log.warning("%s: answer broken off: %s", endpoint.replica, error)
        return
    if isinstance(error, GatewayError):
        raise error
    kind = UpstreamSilent if isinstance(error, UpstreamSilence) else UpstreamFailed
    raise kind(f"function {call.function}: replica {endpoint.replica} {error}") from error


def _begin(scope: Scope, incoming: Incoming) -> _Call:
    raw: bytes = scope["raw_path"]
    name, slash, rest = raw[len(PREFIX) :].partition(b"/")
    target = slash + rest or b"/"
    if query := scope["query_string"]:
        target += b"?" + query
    client = scope.get("client") or ("", 0)
    pairs = scope["headers"]
    headers = for_replica(pairs, client=client[0], scheme=scope["scheme"], version=scope["http_version"])
    declared_bytes = None
    for key, value in pairs:
        if key == b"content-length":
            declared_bytes = int(value)
    marks = identity(pairs)
    headers += marks
    return _Call(
        function=name.decode("latin-1"),
        target=target,
        method=scope["method"],
        headers=headers,
        incoming=incoming,
        declared_bytes=declared_bytes,
        body=None,
        started_s=time.monotonic(),
        id_headers=[*marks, SERVED_BY],
    )


def _trace(call: _Call, tracer: Tracer, scope: Scope) -> None:
    """Begins the span of an invocation; the replica and the client are told of it."""
    call.invocation = invocation = Invocation(tracer, scope["headers"], call.method)
    call.headers = handed_on(call.headers, invocation)
    call.id_headers.append((RESPONSE, invocation.header))


async def _refuse(call: _Call, send: Send, error: GatewayError) -> None:
    call.status = error.status
    body = f"{error}\n".encode()
    headers = [(b"content-length", b"%d" % len(body)), *of_refusal(error.status), *call.id_headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

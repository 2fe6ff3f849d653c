"""`/function/{name}[/...]` with `Upgrade: websocket`: joins the client's WebSocket to a replica's.

Beside `gateway.proxy`, which does the same for plain requests. The client's side is ASGI, the
replica's is `gateway.websocket_upstream`: each side has a connection of its own, with pings, masks
and fragments of its own; messages, subprotocol and close codes pass unchanged. One message at a
time is on its way in each direction, so whoever does not read stops the sender. It must not look
into messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from keystage.gateway.backend import Endpoint, GatewayError
from keystage.gateway.call_headers import identity, of_refusal
from keystage.gateway.headers import HANDSHAKE, HOP_BY_HOP, SERVED_BY, for_client, for_replica
from keystage.gateway.metrics import CLIENT_GONE, Metrics
from keystage.gateway.names import function_name
from keystage.gateway.proxy import PREFIX, UpstreamFailed, UpstreamSilent
from keystage.gateway.replicas import Replicas
from keystage.gateway.upstream import NotConnected
from keystage.gateway.websocket_codes import ABNORMAL, BROKEN, GONE, NO_CODE, fitting, sendable
from keystage.gateway.websocket_upstream import Closed, Upstream, UpstreamRefused, connect

PING_S = 20.0
"""Between two pings of the gateway to each side; an unanswered one ends the connection, see `upstream_s`."""
ACCEPTED = 101
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_T = TypeVar("_T")
_NOT_PASSED = HOP_BY_HOP | HANDSHAKE | {b"content-length", b"date"}
_log = logging.getLogger(__name__)


class _ClientGone(Exception):
    """The client went away before its handshake was answered."""


@dataclasses.dataclass(slots=True)
class _Call:
    """One handshake and what follows it.

    Attributes:
        first: the client's first event after its handshake, asked for while a replica is looked for.
        status: sent to the client, 0 before.
    """

    function: str
    target: str
    headers: list[tuple[str, str]]
    subprotocols: list[str]
    id_headers: list[tuple[bytes, bytes]]
    started_s: float
    first: asyncio.Task[Message]
    status: int = 0


class WebSocketProxy:
    """ASGI application for WebSockets under `/function/`.

    Args:
        replicas: where to connect.
        metrics: counts invocations; an accepted WebSocket is one with status 101 as long as it lasts.
        max_message_bytes: bound of one message of a replica (of a client: the server's own setting).
        upstream_s: seconds for a replica's answer to the handshake, and to a ping; for a client to take
            a message.
    """

    def __init__(
        self, replicas: Replicas, metrics: Metrics, *, max_message_bytes: int, upstream_s: float
    ) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._max_message_bytes = max_message_bytes
        self._upstream_s = upstream_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one WebSocket."""
        await receive()  # websocket.connect
        call = _begin(scope, receive)
        counted = False
        try:
            if not scope["raw_path"].startswith(PREFIX):
                raise _NotFound(f"there is no WebSocket at {scope['path'][:200]}")
            call.function = function_name(call.function)
            self._replicas.check(call.function)
            self._metrics.begin(call.function)
            counted = True
            await self._pass(call, receive, send)
        except UpstreamRefused as refusal:
            await _answer(call, scope, send, refusal.status, for_client(refusal.headers), refusal.body)
        except GatewayError as error:
            await _refuse(call, scope, send, error)
        except _ClientGone:
            call.status = CLIENT_GONE
        finally:
            call.first.cancel()
            await asyncio.wait((call.first,))
            if counted:
                self._metrics.end(call.function, call.status, time.monotonic() - call.started_s)

    async def _pass(self, call: _Call, receive: Receive, send: Send) -> None:
        refused: set[str] = set()
        while True:
            acquiring = self._replicas.acquire(call.function, call.started_s, refused)
            endpoint = await _unless_gone(call, acquiring, self._replicas.release)
            try:
                upstream = await _unless_gone(call, self._open(call, endpoint), Upstream.abort)
                try:
                    await _accept(call, upstream, send)
                    await self._join(upstream, call.first, receive, send)
                finally:
                    upstream.abort()
                return
            except NotConnected as error:
                # No connection, so nothing was sent: another replica may have it.
                _log.info("%s %s", endpoint.replica, error)
                refused.add(endpoint.replica)
            finally:
                self._replicas.release(endpoint)

    async def _open(self, call: _Call, endpoint: Endpoint) -> Upstream:
        try:
            return await connect(
                endpoint.address,
                call.target,
                call.headers,
                call.subprotocols,
                max_message_bytes=self._max_message_bytes,
                ping_s=PING_S,
                silence_s=self._upstream_s,
            )
        except (UpstreamFailed, UpstreamSilent) as error:
            if isinstance(error, UpstreamFailed):
                self._replicas.suspect(endpoint)
            who = f"function {call.function}: replica {endpoint.replica}"
            raise type(error)(f"{who} {error}") from error

    async def _join(
        self, upstream: Upstream, first: Awaitable[Message], receive: Receive, send: Send
    ) -> None:
        """Passes messages both ways until one side closes, and closes the other."""
        loop = asyncio.get_running_loop()
        up = loop.create_task(_upwards(upstream, first, receive))
        down = loop.create_task(_downwards(upstream, send, self._upstream_s))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                down.cancel()
                await upstream.close(*up.result())
            elif (closed := down.result()) is not None:
                with contextlib.suppress(OSError):
                    await send({"type": "websocket.close", "code": closed[0], "reason": closed[1]})
            else:
                await upstream.close(GONE, "")
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)


class _NotFound(GatewayError):
    """No WebSocket is offered there."""

    status = 404


def _begin(scope: Message, receive: Receive) -> _Call:
    name, slash, rest = scope["raw_path"][len(PREFIX) :].partition(b"/")
    target = (slash + rest).decode("latin-1") or "/"
    if query := scope["query_string"]:
        target += "?" + query.decode("latin-1")
    client = scope.get("client") or ("", 0)
    pairs = scope["headers"]
    headers = for_replica(pairs, client=client[0], scheme=scope["scheme"], version=scope["http_version"])
    marks = identity(pairs)
    headers += marks
    return _Call(
        function=name.decode("latin-1"),
        target=target,
        headers=[(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers if k not in HANDSHAKE],
        subprotocols=scope["subprotocols"],
        id_headers=[*marks, SERVED_BY],
        started_s=time.monotonic(),
        first=asyncio.get_running_loop().create_task(_next(receive)),
    )


async def _next(receive: Receive) -> Message:
    return await receive()


async def _unless_gone(call: _Call, work: Coroutine[Any, Any, _T], undo: Callable[[_T], None]) -> _T:
    """Does the work, or stops, and undoes it where it was done all the same, when the client goes away.

    Raises:
        _ClientGone: it went.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task, call.first), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and call.first.result()["type"] != "websocket.disconnect":
            await asyncio.wait((task,))  # the client speaks before it is answered; that is kept
    finally:
        is_done = task.done()
        if not is_done:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None:
                undo(task.result())
    if not is_done:
        raise _ClientGone
    return task.result()


async def _accept(call: _Call, upstream: Upstream, send: Send) -> None:
    headers = [pair for pair in for_client(upstream.headers) if pair[0] not in _NOT_PASSED]
    call.status = ACCEPTED
    with contextlib.suppress(OSError):  # the client went away: its next event says so
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": upstream.subprotocol,
                "headers": headers + call.id_headers,
            }
        )


async def _upwards(upstream: Upstream, first: Awaitable[Message], receive: Receive) -> tuple[int, str]:
    """Messages of the client; returns the close for the replica."""
    message = await first
    is_open = True
    while message["type"] != "websocket.disconnect":
        if is_open:
            data = message.get("bytes")
            try:
                await upstream.send(message["text"] if data is None else data)
            except Closed:
                is_open = False  # `_downwards` meets the same, after what the replica said before
        message = await receive()
    # A server that saw no close frame gives no reason.
    code = message.get("code", NO_CODE) if "reason" in message else ABNORMAL
    return sendable(code, GONE), fitting(message.get("reason") or "")


async def _downwards(upstream: Upstream, send: Send, silence_s: float) -> tuple[int, str] | None:
    """Messages of the replica; returns the close for the client.

    None means that the client is gone, or took nothing for so long that it counts as gone.
    """
    while True:
        try:
            data = await upstream.receive()
        except Closed as closed:
            if closed.code == ABNORMAL:
                return BROKEN, "the replica broke the connection"
            return sendable(closed.code, BROKEN), fitting(closed.reason)
        kind = "text" if isinstance(data, str) else "bytes"
        try:
            async with asyncio.timeout(silence_s):
                await send({"type": "websocket.send", kind: data})
        except OSError:  # TimeoutError is one
            return None


async def _refuse(call: _Call, scope: Message, send: Send, error: GatewayError) -> None:
    await _answer(call, scope, send, error.status, of_refusal(error.status), f"{error}\n".encode())


async def _answer(
    call: _Call, scope: Message, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Answers the handshake with plain HTTP, where the server can, else with its own refusal."""
    call.status = status
    with contextlib.suppress(OSError):
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close"})
            return
        kept = [pair for pair in headers if pair[0] not in _NOT_PASSED]
        kept += [(b"content-length", b"%d" % len(body)), *call.id_headers]
        await send({"type": "websocket.http.response.start", "status": status, "headers": kept})
        await send({"type": "websocket.http.response.body", "body": body})

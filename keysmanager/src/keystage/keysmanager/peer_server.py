"""The node's face over TCP: status, parameters for peers, the controller's key-stage list, metrics.

Routes as in `api`'s docstring, all behind one bearer token. The daemon is behind `PeerBackend`; bytes of
parameters go out through `peer_transfer` in threads, so that a slow peer or disk never holds the
event loop. Refusals are JSON (`{"reason": ...}`) with the status that fits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from keystage.keysmanager.api import Invalidate, NodeStatus, StageName
from keystage.keysmanager.peer_transfer import Transfers
from keystage.keysmanager.pod_api import GRANTS_PATH, Grant
from keystage.wire.bad_requests import tell_in_one_line
from keystage.wire.bearer import Bearer, bearer_of
from keystage.wire.unreadable import UNREADABLE

MAX_BODY_BYTES = 1024 * 1024
"""A key-stage list of a thousand stages takes 200 kB."""

KEEP_ALIVE_S = 150.0
"""Longer than clients keep idle connections: the side that is reused must not be the first to close."""

RETRY_AFTER_S = 1
"""A chunk of 16 MiB is through in less, where the network is not the bound."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class PeerRefused(Exception):
    """The backend cannot do what was asked: reason in one line, HTTP status."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Offered:
    """Parameters that can be read now.

    Attributes:
        fd: a descriptor of its own (dup) of segment or file, which the server closes: a holder that is
            evicted meanwhile does not break a transfer.
        nbytes: bytes of content.
    """

    fd: int
    nbytes: int


class PeerBackend(Protocol):
    """The daemon, as peers and controller see it. Nothing here may block."""

    async def status(self) -> NodeStatus:
        """What is where on this node."""

    async def offer(self, identity: str) -> Offered | None:
        """Opens parameters for reading, None: not here (or invalidated)."""

    async def set_key_stages(self, stages: tuple[StageName, ...]) -> None:
        """Replaces the ranked list; raises `PeerRefused`."""

    async def invalidate(self, identity: str) -> None:
        """Ends what holds these parameters; raises `PeerRefused`."""

    def set_grants(self, grants: tuple[Grant, ...]) -> None:
        """Replaces the list of pods and what they may have; raises `PeerRefused`."""

    def metrics(self) -> bytes:
        """Prometheus text."""


def make_app(backend: PeerBackend, token: Bearer | str) -> web.Application:
    """Makes the application.

    Args:
        backend: the daemon.
        token: bearer token that every request must carry.

    Raises:
        ValueError: the token is empty.
    """
    bearer = bearer_of(token)
    if not bearer.current:
        raise ValueError("the TCP face needs a token: it would serve parameters to anybody")
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals, _bearer(bearer)])
    transfers = Transfers()

    async def call_off(_: web.Application) -> None:
        transfers.call_off()

    async def close(_: web.Application) -> None:
        await asyncio.to_thread(transfers.close)

    app.on_shutdown.append(call_off)
    app.on_cleanup.append(close)
    routes = _Routes(backend, transfers)
    app.add_routes(
        [
            web.get("/v1/status", routes.status),
            web.get("/v1/parameters/{identity}", routes.parameters, allow_head=False),
            web.put("/v1/key-stages", routes.key_stages),
            web.post("/v1/invalidate", routes.invalidate),
            web.put(GRANTS_PATH, routes.grants),
            web.get("/metrics", routes.metrics),
        ]
    )
    return app


async def start(app: web.Application, listening: socket.socket) -> web.AppRunner:
    """Serves on a bound socket until the runner's `cleanup` is awaited."""
    tell_in_one_line()
    runner = web.AppRunner(
        app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=2.0, auto_decompress=False
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    return runner


def _refusal(reason: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode({"reason": reason}),
        status=status,
        content_type="application/json",
        headers=headers,
    )


@web.middleware
async def _refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PeerRefused as error:
        return _refusal(str(error), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return _refusal(f"body exceeds {MAX_BODY_BYTES} bytes", error.status)
    except web.HTTPException as error:
        kept = {key: value for key, value in error.headers.items() if key == hdrs.ALLOW}
        return _refusal(f"{request.method} {request.path}: {error.reason}", error.status, kept)


def _bearer(bearer: Bearer) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
        if not bearer.admits(given):
            return _refusal("bearer token missing or wrong", 401, {hdrs.WWW_AUTHENTICATE: "Bearer"})
        return await handler(request)

    return check


class _Routes:
    def __init__(self, backend: PeerBackend, transfers: Transfers) -> None:
        self._backend = backend
        self._transfers = transfers

    async def status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(await self._backend.status())
        return web.Response(body=body, content_type="application/json")

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._backend.metrics(),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def key_stages(self, request: web.Request) -> web.Response:
        stages = await _decoded(request, tuple[StageName, ...])
        await self._backend.set_key_stages(stages)
        return web.Response(status=204)

    async def grants(self, request: web.Request) -> web.Response:
        self._backend.set_grants(await _decoded(request, tuple[Grant, ...]))
        return web.Response(status=204)

    async def invalidate(self, request: web.Request) -> web.Response:
        wanted = await _decoded(request, Invalidate)
        await self._backend.invalidate(wanted.identity)
        return web.Response(status=204)

    async def parameters(self, request: web.Request) -> web.StreamResponse:
        identity = request.match_info["identity"]
        offered = await self._backend.offer(identity)
        if offered is None:
            raise PeerRefused(f"parameters {identity}: not on this node", 404)
        try:
            return await self._send(request, offered)
        finally:
            os.close(offered.fd)

    async def _send(self, request: web.Request, offered: Offered) -> web.StreamResponse:
        span = _range(request, offered.nbytes)
        if span is None:
            return _refusal(
                f"range {request.headers[hdrs.RANGE][:100]!r}: one range of {offered.nbytes} bytes is served",
                416,
                {hdrs.CONTENT_RANGE: f"bytes */{offered.nbytes}"},
            )
        offset, length = span
        is_part = hdrs.RANGE in request.headers
        response = web.StreamResponse(status=206 if is_part else 200)
        response.content_type = "application/octet-stream"
        response.content_length = length
        response.headers[hdrs.ACCEPT_RANGES] = "bytes"
        if is_part:
            response.headers[hdrs.CONTENT_RANGE] = f"bytes {offset}-{offset + length - 1}/{offered.nbytes}"
        ticket = self._transfers.ticket()
        if ticket is None:
            reason = f"{self._transfers.limit} transfers run already"
            return _refusal(reason, 503, {hdrs.RETRY_AFTER: str(RETRY_AFTER_S)})
        with ticket:
            await response.prepare(request)
            await self._transfers.send(request, offered.fd, offset, length)
        await response.write_eof()
        return response


def _range(request: web.Request, nbytes: int) -> tuple[int, int] | None:
    """Offset and length that are asked for; None: not satisfiable."""
    try:
        asked = request.http_range
    except ValueError:
        return None
    start, stop, _ = asked.indices(nbytes)
    if start >= stop or request.headers.get(hdrs.RANGE, "").rstrip("0") == "bytes=-":
        return None
    return start, stop - start


async def _decoded(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNREADABLE as error:
        raise PeerRefused(f"{request.method} {request.path}: {error}", 400) from error

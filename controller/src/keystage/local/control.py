"""The control socket: `local.api` over HTTP on a UNIX socket.

Gateway and controller are its clients, `local.supervisor` does the work. Only processes of the
same user reach it: the socket lies in a folder of mode 0700. It must not hold state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from keystage.local.api import (
    MAX_SECRET_BYTES,
    Cpu,
    Deployment,
    Desired,
    FunctionRecord,
    Intent,
    KeyStageList,
    Load,
    UpgradeRequest,
)
from keystage.local.errors import BadDeployment, LocalError
from keystage.local.events import CoresSet, Deployed, Intended, Removed, Scaled
from keystage.local.supervisor import Supervisor
from keystage.local.upgrades import Upgrades
from keystage.observability.board import MAX_REPORT_BYTES, NoReport, Since
from keystage.wire.bad_requests import tell_in_one_line
from keystage.wire.unreadable import UNREADABLE

WATCH_S = 20.0
MAX_BODY_BYTES = MAX_SECRET_BYTES + 4096
"""A little more than the largest secret, whose own check names it."""
T = TypeVar("T")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except LocalError as error:
        return _json({"error": str(error)}, error.status)
    except web.HTTPRequestEntityTooLarge:
        return _json({"error": f"body has more than {MAX_BODY_BYTES} bytes"}, 400)


async def _report_of(request: web.Request) -> bytes:
    """The body of a report, which may be larger than all others."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_REPORT_BYTES:
            raise BadDeployment(f"a report has more than {MAX_REPORT_BYTES} bytes")
    return bytes(body)


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNREADABLE as error:
        raise BadDeployment(f"body is no {kind.__name__}: {error}") from error


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise BadDeployment(f"query parameter {name} must be a number of at least 0, not {text!r}")
    return value


class Control:
    """HTTP server of one supervisor.

    Args:
        supervisor: does the work.
        upgrades: those of its world, None: it cannot be upgraded.
    """

    def __init__(self, supervisor: Supervisor, upgrades: Upgrades | None = None) -> None:
        self._supervisor = supervisor
        self._upgrades = upgrades
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/functions", self._functions)
        app.router.add_get("/functions/{name}", self._function)
        app.router.add_put("/functions/{name}", self._deploy)
        app.router.add_delete("/functions/{name}", self._remove)
        app.router.add_put("/functions/{name}/intent", self._intend)
        app.router.add_put("/functions/{name}/replicas", self._scale)
        app.router.add_put("/functions/{name}/cpu", self._set_cores)
        app.router.add_put("/functions/{name}/load", self._load)
        app.router.add_get("/functions/{name}/usage", self._usage)
        app.router.add_get("/functions/{name}/logs", self._logs)
        app.router.add_get("/secrets", self._secrets)
        app.router.add_put("/secrets/{name}", self._put_secret)
        app.router.add_delete("/secrets/{name}", self._delete_secret)
        app.router.add_get("/replicas", self._replicas)
        app.router.add_put("/key-stages", self._key_stages)
        app.router.add_get("/nodes", self._nodes)
        app.router.add_get("/starts", self._starts)
        app.router.add_put("/report", self._put_report)
        app.router.add_get("/report", self._report)
        app.router.add_get("/watch", self._watch)
        if upgrades is not None:
            app.router.add_post("/upgrade", self._upgrade)
            app.router.add_get("/upgrade", self._upgrade_status)
        tell_in_one_line()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, auto_decompress=False)

    async def start(self, path: Path) -> None:
        """Serves on a UNIX socket."""
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()
        await asyncio.to_thread(path.chmod, 0o600)  # in a folder of mode 0700

    async def stop(self) -> None:
        """Stops serving and removes the socket."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _functions(self, _: web.Request) -> web.Response:
        return _json(self._supervisor.loaded())

    async def _function(self, request: web.Request) -> web.Response:
        return _json(self._supervisor.loaded(request.match_info["name"])[0])

    async def _deploy(self, request: web.Request) -> web.Response:
        deployment = await _body(request, Deployment)
        name = request.match_info["name"]
        if deployment.service != name:
            raise BadDeployment(f"service {deployment.service!r} does not match the path's function {name!r}")
        self._supervisor.handle(Deployed(deployment))
        return _json(self._record(request))

    async def _remove(self, request: web.Request) -> web.Response:
        self._supervisor.handle(Removed(request.match_info["name"]))
        return web.Response(status=204)

    async def _intend(self, request: web.Request) -> web.Response:
        self._supervisor.handle(Intended(request.match_info["name"], await _body(request, Intent)))
        return _json(self._record(request))

    async def _scale(self, request: web.Request) -> web.Response:
        desired = await _body(request, Desired)
        decided_at_s = self._supervisor.monotonic_to_unix(desired.decided_at_s)
        name = request.match_info["name"]
        self._supervisor.handle(Scaled(name, desired.replicas, desired.sites, desired.victims, decided_at_s))
        return _json(self._record(request))

    async def _set_cores(self, request: web.Request) -> web.Response:
        cpu = await _body(request, Cpu)
        self._supervisor.handle(CoresSet(request.match_info["name"], cpu.cores))
        return _json(self._record(request))

    async def _load(self, request: web.Request) -> web.Response:
        self._supervisor.hear(request.match_info["name"], await _body(request, Load))
        return web.Response(status=204)

    async def _usage(self, request: web.Request) -> web.Response:
        return _json(await self._supervisor.usage(request.match_info["name"]))

    async def _secrets(self, _: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._supervisor.secrets.names))

    async def _put_secret(self, request: web.Request) -> web.Response:
        name, value = request.match_info["name"], await request.read()
        create = None
        if request.headers.get("If-None-Match") == "*":
            create = True
        elif request.headers.get("If-Match") == "*":
            create = False
        # Not in a thread: two requests for one name must not both create it.
        is_new = self._supervisor.secrets.put(name, value, create=create)
        return web.Response(status=201 if is_new else 204)

    async def _delete_secret(self, request: web.Request) -> web.Response:
        self._supervisor.secrets.delete(request.match_info["name"])
        return web.Response(status=204)

    async def _logs(self, request: web.Request) -> web.Response:
        tail = _number(request, "tail", -1.0)
        rows = await asyncio.to_thread(
            self._supervisor.log,
            request.match_info["name"],
            tail=int(tail) if 0 <= tail < 1e9 else None,
            since_s=_number(request, "since", 0.0),
        )
        return web.Response(text="".join(f"{replica}|{at_s:.6f}|{line}\n" for at_s, replica, line in rows))

    async def _replicas(self, _: web.Request) -> web.Response:
        return _json(self._supervisor.view().replicas)

    async def _key_stages(self, request: web.Request) -> web.Response:
        self._supervisor.set_key_stages(await _body(request, KeyStageList))
        return web.Response(status=204)

    async def _nodes(self, _: web.Request) -> web.Response:
        return _json(self._supervisor.nodes())

    async def _starts(self, _: web.Request) -> web.Response:
        return _json(self._supervisor.starts())

    async def _watch(self, request: web.Request) -> web.Response:
        since = _number(request, "since", 0.0)
        return _json(await self._supervisor.watch(int(since) if since < 1e18 else 0, WATCH_S))

    async def _put_report(self, request: web.Request) -> web.Response:
        try:
            self._supervisor.reports.put(await _report_of(request))
        except NoReport as error:
            raise BadDeployment(str(error)) from error
        return web.Response(status=204)

    async def _report(self, request: web.Request) -> web.Response:
        controller, number = request.query.get("controller", ""), _number(request, "since", 0.0)
        since: Since = (controller, int(min(number, 1e18))) if controller else None
        body = await self._supervisor.reports.wait(since, min(WATCH_S, _number(request, "wait", 0.0)))
        if body is None:
            return web.Response(status=204)
        return web.Response(body=body, content_type="application/json")

    async def _upgrade(self, request: web.Request) -> web.Response:
        assert self._upgrades is not None
        return _json(await self._upgrades.begin(await _body(request, UpgradeRequest)), 202)

    async def _upgrade_status(self, _: web.Request) -> web.Response:
        assert self._upgrades is not None
        return _json(self._upgrades.status)

    def _record(self, request: web.Request) -> FunctionRecord:
        return self._supervisor.function(request.match_info["name"])

"""The management half of the OpenFaaS REST API: functions, scale, logs, info.

`faas-cli` and the command line call it; it calls the backend. Statuses are those of an OpenFaaS
provider: 202 for a write, 404 for an update of what does not exist (faas-cli then creates it).
Every route but `/healthz` and `/metrics` needs credentials. It must not proxy invocations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from keystage.gateway import types
from keystage.gateway.auth import Credentials
from keystage.gateway.backend import (
    AlreadyDeployed,
    Backend,
    BadRequest,
    GatewayError,
    TooLarge,
    UnknownFunction,
)
from keystage.gateway.metrics import Metrics
from keystage.gateway.names import NAMESPACE, check_name, check_namespace, function_name
from keystage.local.api import Deployment

MAX_BODY_BYTES = 1 << 20
FOLLOW_EVERY_S = 0.25
OPEN_PATHS = frozenset({"/healthz", "/metrics"})
T = TypeVar("T")


class Management:
    """Handlers over one backend."""

    def __init__(self, backend: Backend, metrics: Metrics, override_s: float) -> None:
        self._backend = backend
        self._metrics = metrics
        self._override_s = override_s

    async def healthz(self, _: Request) -> Response:
        """The gateway is alive."""
        return Response("ok\n", media_type="text/plain")

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return Response(
            self._metrics.render(self._backend.functions()), media_type="text/plain; version=0.0.4"
        )

    async def info(self, _: Request) -> Response:
        """Who provides."""
        return _json(types.GATEWAY_INFO)

    async def namespaces(self, _: Request) -> Response:
        """The one namespace."""
        return _json([NAMESPACE])

    async def list_functions(self, request: Request) -> Response:
        """All functions."""
        check_namespace(request.query_params.get("namespace", ""))
        return _json([self._status(s.deployment.service) for s in self._backend.functions()])

    async def describe(self, request: Request) -> Response:
        """One function."""
        check_namespace(request.query_params.get("namespace", ""))
        return _json(self._status(function_name(request.path_params["name"])))

    async def create(self, request: Request) -> Response:
        """Deploys a new function."""
        deployment = await _deployment(request)
        if any(s.deployment.service == deployment.service for s in self._backend.functions()):
            raise AlreadyDeployed(f"function {deployment.service} is deployed already: update it with PUT")
        await self._backend.put(deployment)
        return Response(status_code=202)

    async def update(self, request: Request) -> Response:
        """Replaces a function."""
        deployment = await _deployment(request)
        self._backend.get(deployment.service)
        await self._backend.put(deployment)
        return Response(status_code=202)

    async def delete(self, request: Request) -> Response:
        """Drains and removes a function."""
        body = await _read(request, types.DeleteFunctionRequest)
        check_namespace(body.namespace)
        await self._backend.delete(function_name(body.functionName))
        return Response(status_code=202)

    async def scale(self, request: Request) -> Response:
        """Records a person's wish for replicas; it expires."""
        body = await _read(request, types.ScaleServiceRequest)
        check_namespace(body.namespace or request.query_params.get("namespace", ""))
        name = function_name(request.path_params["name"])
        if body.serviceName and function_name(body.serviceName) != name:
            raise BadRequest(f"serviceName {body.serviceName!r} does not match the path's function {name!r}")
        self._backend.get(name)
        await self._backend.override(name, body.replicas, time.time() + self._override_s)
        return Response(status_code=202)

    async def logs(self, request: Request) -> Response:
        """Output of a function, one JSON object per line."""
        query = types.LogQuery.parse(dict(request.query_params))
        check_namespace(query.namespace)
        name = function_name(query.name)
        self._backend.get(name)
        return StreamingResponse(self._log_lines(name, query), media_type="application/x-ndjson")

    async def _log_lines(self, name: str, query: types.LogQuery) -> AsyncIterator[bytes]:
        tail, since_s = query.tail, query.since_s
        while True:
            try:
                lines = await self._backend.logs(name, tail=tail, since_s=since_s)
            except UnknownFunction:
                return  # removed meanwhile: its output ends here
            for line in lines:
                if query.instance in ("", line.replica):
                    yield msgspec.json.encode(types.log_message(name, line)) + b"\n"
                # Times are kept to the microsecond; half of one more skips exactly this line.
                since_s = max(since_s, line.at_s + 5e-7)
            tail = None
            if not query.follow:
                return
            await asyncio.sleep(FOLLOW_EVERY_S)

    def _status(self, name: str) -> types.FunctionStatus:
        return types.function_status(self._backend.get(name), self._metrics.invocations(name))


def make_app(management: Management, credentials: Credentials) -> FastAPI:
    """Puts the routes together."""
    app = FastAPI(title="Keystage gateway", docs_url=None, redoc_url=None, openapi_url=None)
    m = management
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/healthz", m.healthz),
        ("GET", "/metrics", m.metrics),
        ("GET", "/system/info", m.info),
        ("GET", "/system/namespaces", m.namespaces),
        ("GET", "/system/functions", m.list_functions),
        ("POST", "/system/functions", m.create),
        ("PUT", "/system/functions", m.update),
        ("DELETE", "/system/functions", m.delete),
        ("GET", "/system/function/{name}", m.describe),
        ("POST", "/system/scale-function/{name}", m.scale),
        ("GET", "/system/logs", m.logs),
    ]
    for method, path, handler in routes:
        app.add_route(path, handler, methods=[method])

    @app.middleware("http")
    async def _authorise(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        if path not in OPEN_PATHS and not credentials.admit(request.headers.get("authorization")):
            return Response(
                "credentials are missing or wrong\n",
                401,
                {"WWW-Authenticate": 'Basic realm="Restricted"'},
                "text/plain",
            )
        return await call_next(request)

    @app.exception_handler(GatewayError)
    async def _refuse(_: Request, error: GatewayError) -> Response:
        return Response(f"{error}\n", error.status, media_type="text/plain")

    @app.exception_handler(HTTPException)
    async def _unknown(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path[:200]}: {error.detail}\n"
        return Response(text, error.status_code, error.headers, "text/plain")

    return app


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _read(request: Request, kind: type[T]) -> T:
    """Decodes a bounded JSON body; `null` members count as absent, as Go programs send them."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"request body has {len(body)} bytes or more, at most {MAX_BODY_BYTES} are taken")
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, dict):
            value = {key: member for key, member in value.items() if member is not None}
        return msgspec.convert(value, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"body is no {kind.__name__}: {error}") from error


async def _deployment(request: Request) -> Deployment:
    deployment = await _read(request, Deployment)
    check_namespace(deployment.namespace)
    check_name(deployment.service)
    return deployment

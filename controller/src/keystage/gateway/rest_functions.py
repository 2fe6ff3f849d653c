"""Handlers of the management API for functions: deploy, list, describe, scale, logs.

Behind `gateway.rest`, before the backend. Statuses are those of an OpenFaaS provider: 202 for a
write, 404 for an update of what does not exist (faas-cli then creates it).
"""

from __future__ import annotations

import time

from fastapi import Request, Response

from keystage.gateway import types
from keystage.gateway.backend import AlreadyDeployed, Backend, BadRequest
from keystage.gateway.metrics import Metrics
from keystage.gateway.names import check_name, check_namespace, check_secret_name, function_name
from keystage.gateway.queries import LogQuery, boolean
from keystage.gateway.rest_body import json_answer, read_body
from keystage.gateway.rest_logs import LogLines
from keystage.local import labels
from keystage.local.api import Deployment

MAX_SHOWN = 40
"""Digits of a number that a message shows."""


class Functions:
    """Handlers over one backend; names are those of the route table."""

    def __init__(self, backend: Backend, metrics: Metrics, override_s: float) -> None:
        self._backend = backend
        self._metrics = metrics
        self._override_s = override_s

    async def list_functions(self, request: Request) -> Response:
        """All functions."""
        check_namespace(request.query_params.get("namespace", ""))
        states = self._backend.functions()
        rows = [types.function_status(s, self._metrics.invocations(s.deployment.service)) for s in states]
        return json_answer(rows)

    async def describe(self, request: Request) -> Response:
        """One function, with what it uses if that is asked for."""
        check_namespace(request.query_params.get("namespace", ""))
        name = function_name(request.path_params["name"])
        with_usage = boolean(request.query_params, "usage")
        state = self._backend.get(name)
        usage = await self._backend.usage(name) if with_usage else None
        return json_answer(types.function_status(state, self._metrics.invocations(name), usage))

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
        body = await read_body(request, types.DeleteFunctionRequest)
        check_namespace(body.namespace or "")
        await self._backend.delete(function_name(body.functionName))
        return Response(status_code=202)

    async def scale(self, request: Request) -> Response:
        """Records a person's wish for replicas; it expires."""
        body = await read_body(request, types.ScaleServiceRequest)
        check_namespace(body.namespace or "")
        check_namespace(request.query_params.get("namespace", ""))
        name = function_name(request.path_params["name"])
        if body.serviceName and function_name(body.serviceName) != name:
            raise BadRequest(f"serviceName {body.serviceName!r} does not match the path's function {name!r}")
        self._backend.get(name)
        if not 0 <= body.replicas <= labels.MAX_REPLICAS:
            shown = str(body.replicas)[:MAX_SHOWN]
            raise BadRequest(f"function {name}: replicas must be in 0..{labels.MAX_REPLICAS}, not {shown}")
        await self._backend.override(name, body.replicas, time.time() + self._override_s)
        return Response(status_code=202)

    async def logs(self, request: Request) -> Response:
        """Output of a function, one JSON object per line."""
        query = LogQuery.parse(request.query_params)
        check_namespace(query.namespace)
        name = function_name(query.name)
        self._backend.get(name)
        lines = LogLines(self._backend, name, query)
        await lines.begin()
        return lines


async def _deployment(request: Request) -> Deployment:
    deployment = (await read_body(request, types.FunctionDeployment)).deployment()
    check_namespace(deployment.namespace)
    check_name(deployment.service)
    for secret in deployment.secrets:
        check_secret_name(secret)
    return deployment

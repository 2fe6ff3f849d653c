"""Handlers of the management API beside functions: health, metrics, info, namespaces, secrets.

Behind `gateway.rest`, before the backend. What OpenFaaS has and Keystage does not do is refused
here with its reason. A secret's value must not come into an answer, a message or a log.
"""

from __future__ import annotations

import asyncio

from fastapi import Request, Response

from keystage.gateway import types
from keystage.gateway.backend import STALE_S, Backend, BackendUnavailable, BadRequest, GatewayError
from keystage.gateway.metrics import Metrics, written
from keystage.gateway.names import NAMESPACE, check_namespace, check_secret_name
from keystage.gateway.openapi import encoded
from keystage.gateway.rest_body import json_answer, read_body
from keystage.local.api import MAX_SECRET_BYTES

_SHOWN = 80
MAX_SECRET_BODY_BYTES = 6 * MAX_SECRET_BYTES + 4 * (MAX_SECRET_BYTES + 2) // 3 + (64 << 10)
"""Clients send a value twice: as text, six characters a byte at worst, and in base64; and its name."""


class Refused(GatewayError):
    """Part of OpenFaaS' API that is not done here."""

    status = 403


class NamespaceExists(GatewayError):
    """A create for the one namespace."""

    status = 409


class UnknownNamespace(GatewayError):
    """Not the one namespace."""

    status = 404


class System:
    """Handlers over one backend; names are those of the route table."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._openapi = encoded()

    async def healthz(self, _: Request) -> Response:
        """The gateway is alive, and knows where requests may go."""
        age_s = self._backend.view_age_s()
        if age_s > STALE_S:
            raise BackendUnavailable(
                f"the view of functions and replicas is {age_s:.0f} s old, at most {STALE_S:.0f} s are "
                "healthy: the supervisor does not answer as it should"
            )
        return Response("ok\n", media_type="text/plain")

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        shown = self._metrics.look(self._backend.functions())
        text, kind = await asyncio.to_thread(written, shown, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": kind})

    async def openapi(self, _: Request) -> Response:
        """What this API is."""
        return Response(self._openapi, media_type="application/json")

    async def info(self, _: Request) -> Response:
        """Who provides."""
        return json_answer(types.GATEWAY_INFO)

    async def telemetry(self, _: Request) -> Response:
        """Nothing is sent anywhere."""
        return json_answer(types.Telemetry())

    async def alert(self, _: Request) -> Response:
        """Refused."""
        raise Refused(
            "alerts scale nothing here: the controller alone writes replica numbers; a person's wish goes to "
            "/system/scale-function/{name}, bounds are the labels com.openfaas.scale.min and .max"
        )

    # ------------------------------------------------------------ namespaces

    async def namespaces(self, _: Request) -> Response:
        """The one namespace."""
        return json_answer([NAMESPACE])

    async def namespace(self, request: Request) -> Response:
        """One namespace."""
        _known(request)
        return json_answer(types.FunctionNamespace(NAMESPACE, {}, {}))

    async def create_namespace(self, request: Request) -> Response:
        """Refused; the name is in the body."""
        raise _not_created((await read_body(request, types.FunctionNamespace)).name)

    async def create_named_namespace(self, request: Request) -> Response:
        """Refused; the name is in the path."""
        raise _not_created(request.path_params["name"])

    async def update_namespace(self, request: Request) -> Response:
        """Refused."""
        _known(request)
        raise Refused(f"namespace {NAMESPACE} cannot be changed: its labels and annotations have no use here")

    async def delete_namespace(self, request: Request) -> Response:
        """Refused."""
        _known(request)
        raise Refused(f"namespace {NAMESPACE} cannot be removed: it is the only one")

    # ------------------------------------------------------------ secrets

    async def list_secrets(self, request: Request) -> Response:
        """Names, never values."""
        check_namespace(request.query_params.get("namespace", ""))
        return json_answer([types.SecretName(name, NAMESPACE) for name in await self._backend.secrets()])

    async def create_secret(self, request: Request) -> Response:
        """Creates a secret."""
        name, value = await _secret(request)
        await self._backend.put_secret(name, value, create=True)
        return Response(status_code=202)

    async def update_secret(self, request: Request) -> Response:
        """Replaces a secret."""
        name, value = await _secret(request)
        await self._backend.put_secret(name, value, create=False)
        return Response(status_code=202)

    async def delete_secret(self, request: Request) -> Response:
        """Removes a secret."""
        body = await read_body(request, types.SecretName)
        check_namespace(body.namespace or "")
        check_secret_name(body.name)
        await self._backend.delete_secret(body.name)
        return Response(status_code=202)


def _known(request: Request) -> None:
    name = request.path_params["name"]
    if name != NAMESPACE:
        raise UnknownNamespace(f"namespace {name[:_SHOWN]!r} does not exist: the only one is {NAMESPACE}")


def _not_created(name: str) -> GatewayError:
    if name == NAMESPACE:
        return NamespaceExists(f"namespace {NAMESPACE} exists already")
    return Refused(f"namespace {name[:_SHOWN]!r} cannot be created: the only one is {NAMESPACE}")


async def _secret(request: Request) -> tuple[str, bytes]:
    body = await read_body(request, types.Secret, MAX_SECRET_BODY_BYTES)
    check_namespace(body.namespace or "")
    check_secret_name(body.name)
    value = body.rawValue or (body.value or "").encode()
    if not value:
        raise BadRequest(f"secret {body.name}: value and rawValue are both missing or empty; give one")
    if len(value) > MAX_SECRET_BYTES:
        raise BadRequest(f"secret {body.name} must have 1..{MAX_SECRET_BYTES} bytes, not {len(value)}")
    return body.name, value

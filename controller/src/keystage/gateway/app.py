"""The gateway's process: `python -m keystage.gateway.app`.

Puts backend, proxy and management together under one ASGI application and serves it with uvicorn
until SIGTERM, or until its lifeline ends. Stateless: any number may run, and one may be restarted
at any time.
"""

from __future__ import annotations

import logging
import sys

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import ValidationError

from keystage.gateway.auth import Credentials
from keystage.gateway.backend import GatewayError
from keystage.gateway.config import GatewaySettings
from keystage.gateway.incoming import Receive
from keystage.gateway.local import LocalBackend
from keystage.gateway.metrics import Metrics
from keystage.gateway.proxy import Proxy, Scope, Send
from keystage.gateway.replicas import Replicas
from keystage.gateway.rest import Management, make_app
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline

KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections (90 s), so that it is they who close them."""
STOP_S = 3
"""For running requests when the gateway itself is told to stop."""


class Gateway:
    """Dispatches: invocations to the proxy, everything else to management."""

    def __init__(self, proxy: Proxy, management: FastAPI) -> None:
        self._proxy = proxy
        self._management = management

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and scope["raw_path"].startswith(b"/function/"):
            await self._proxy(scope, receive, send)
        else:
            await self._management(scope, receive, send)


def read_credentials(settings: GatewaySettings) -> Credentials:
    """Reads user and password from their files.

    Raises:
        GatewayError: one is missing or empty.
    """
    values = []
    for name in ("basic-auth-user", "basic-auth-password"):
        file = settings.credentials / name
        try:
            values.append(file.read_text().strip())
        except OSError as error:
            raise GatewayError(f"credentials file {file} cannot be read: {error.strerror}") from error
        if not values[-1]:
            raise GatewayError(f"credentials file {file} is empty")
    return Credentials(values[0], values[1])


async def serve(settings: GatewaySettings) -> None:
    """Serves until told to stop.

    Raises:
        GatewayError: credentials or backend cannot be used.
        EndpointError: the address cannot be listened on.
    """
    credentials = read_credentials(settings)
    backend = LocalBackend(settings.control)
    metrics = Metrics()
    proxy = Proxy(
        Replicas(backend, settings.wake_s),
        metrics,
        max_body_bytes=settings.max_body_bytes,
        upstream_s=settings.upstream_s,
    )
    app = Gateway(proxy, make_app(Management(backend, metrics, settings.override_s), credentials))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
    )
    listening = listen(settings.http)
    watch_lifeline(settings.lifeline_fd)
    await backend.start()
    try:
        await proxy.start()
        await server.serve(sockets=[listening])
    finally:
        await proxy.stop()
        await backend.stop()


def main() -> int:
    """Runs the gateway and returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(serve(GatewaySettings()))  # type: ignore[call-arg]  # fields come from the environment
    except (GatewayError, EndpointError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"]).upper()
            sys.stderr.write(f"KEYSTAGE_{name}={fault['input']}: {fault['msg']}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

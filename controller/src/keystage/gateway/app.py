"""The gateway's process: `python -m keystage.gateway.app`.

Puts management, plain and WebSocket invocations and asynchronous calls together under one ASGI
application, beside it the backend's view and the report of loads, and serves it with uvicorn until
SIGTERM, or until its lifeline ends. Any number may run, and one may be restarted at any time: what
outlasts it is the backend's and, where one is named, Redis'; a queue in memory ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import uvicorn
import uvloop
from pydantic import ValidationError

from keystage.gateway.auth import Credentials
from keystage.gateway.backend import Backend, GatewayError
from keystage.gateway.config import GatewaySettings
from keystage.gateway.incoming import Receive
from keystage.gateway.internal import PREFIXES, Internal
from keystage.gateway.leaving import LeavingServer
from keystage.gateway.load import LoadReporter
from keystage.gateway.local import LocalBackend
from keystage.gateway.metrics import Metrics
from keystage.gateway.proxy import PREFIX, Proxy, Scope, Send
from keystage.gateway.queue_build import build_async_calls
from keystage.gateway.queue_calls import PREFIX as ASYNC_PREFIX
from keystage.gateway.replicas import Replicas
from keystage.gateway.rest import Management, make_app
from keystage.gateway.server import client_crowd, client_protocol, settle_memory
from keystage.gateway.timeouts import silence_s
from keystage.gateway.websocket import PING_S, WebSocketProxy
from keystage.kubernetes.asking import internal_bearer
from keystage.wire.crowd import places
from keystage.wire.descriptors import raise_descriptors
from keystage.wire.endpoints import EndpointError, listen, watch_lifeline
from keystage.wire.errors import WireError
from keystage.wire.faults import faults_of
from keystage.wire.garbage import collect_young
from keystage.wire.metrics import Sample, Samples
from keystage.wire.tracing import open_tracer
from keystage.wire.upkeep import one_heap

BACKLOG = 2048
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections (90 s), so that it is they who close them."""
LEAVE_S = 2.0
"""See `GatewaySettings.leave_s`."""
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Part(Protocol):
    """What runs as long as the gateway does. Started in order, stopped in reverse."""

    async def start(self) -> None:
        """Opens what it needs."""

    async def stop(self) -> None:
        """Closes it; also after a start that failed."""


class Gateway:
    """Dispatches by type and path: each hot path to its handler, everything else to management.

    Args:
        management: takes what no other handler takes.
        http: path prefix and its handler, the first that matches.
        websocket: takes every WebSocket handshake; None refuses them (ASGI servers answer 403).
    """

    def __init__(
        self, management: Asgi, http: Sequence[tuple[bytes, Asgi]], websocket: Asgi | None = None
    ) -> None:
        self._management = management
        self._http = tuple(http)
        self._websocket = websocket

    def add(self, http: Sequence[tuple[bytes, Asgi]]) -> None:
        """Takes further handlers, after those that there are."""
        self._http += tuple(http)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http":
            path = scope["raw_path"]
            for prefix, handler in self._http:
                if path.startswith(prefix):
                    await handler(scope, receive, send)
                    return
            await self._management(scope, receive, send)
        elif self._websocket is not None:
            await self._websocket(scope, receive, send)
        else:
            await send({"type": "websocket.close"})


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


def make_backend(settings: GatewaySettings) -> Backend:
    """What runs functions, as the settings say.

    Raises:
        GatewayError: there is no cluster to be found.
    """
    if settings.backend == "kubernetes":
        # The client takes as long to load as all the rest: not where it is not used.
        from keystage.gateway.kubernetes import backend_for

        return backend_for(settings)
    assert settings.control is not None, "checked by the settings"
    return LocalBackend(settings.control)


def internal_handlers(
    settings: GatewaySettings, backend: Backend, reporter: LoadReporter, is_leaving: Callable[[], bool]
) -> list[tuple[bytes, Asgi]]:
    """What a cluster asks its gateways, by path; nothing elsewhere.

    Raises:
        WireError: the deployment's secret cannot be used.
    """
    if settings.backend != "kubernetes":
        return []
    assert settings.wire_key_file is not None, "checked by the settings"
    from keystage.gateway.kubernetes import KubernetesBackend  # loaded already: see `make_backend`

    assert isinstance(backend, KubernetesBackend)
    token = internal_bearer(settings.wire_key_file)
    internal = Internal(backend, reporter.present, backend.reports, token, is_leaving)
    return [(prefix, internal) for prefix in PREFIXES]


async def serve(settings: GatewaySettings) -> None:
    """Serves until told to stop.

    Raises:
        GatewayError: credentials or backend cannot be used.
        WireError: the deployment's secret cannot be used.
        EndpointError: the address cannot be listened on.
    """
    descriptors = raise_descriptors()
    credentials = read_credentials(settings)
    backend = make_backend(settings)
    metrics = Metrics()
    metrics.export(Samples(lambda: [Sample("keystage_view_age_seconds", {}, backend.view_age_s())]))
    replicas = Replicas(backend, settings.wake_s, settings.max_waiting)
    reporter = LoadReporter(backend, metrics, replicas)
    upstream_s = silence_s(settings.timeout_s)
    tracer = open_tracer("keystage-gateway")
    proxy = Proxy(
        replicas, metrics, max_body_bytes=settings.max_body_bytes, upstream_s=upstream_s, tracer=tracer
    )
    websockets = WebSocketProxy(
        replicas, metrics, max_message_bytes=settings.max_body_bytes, upstream_s=upstream_s
    )
    calls = build_async_calls(settings, replicas, metrics, upstream_s)
    http: list[tuple[bytes, Asgi]] = [(PREFIX, proxy), (ASYNC_PREFIX, calls)]
    management = Management(backend, metrics, settings.override_s)
    app = Gateway(make_app(management, credentials), http, websocket=websockets)
    parts: tuple[Part, ...] = (backend, reporter, proxy, calls)
    # Each takes a connection to a replica as well.
    most = settings.most_connections or places(descriptors, each=2)
    spare = max(4, (descriptors - 2 * most) // 4)
    age_s = settings.connection_age_s or math.inf
    protocol = client_protocol(upstream_s, crowd=client_crowd(most, min(spare, most)), age_s=age_s)
    server = LeavingServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="websockets-sansio",
            ws_max_size=settings.max_body_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=upstream_s,
            ws_per_message_deflate=False,
            lifespan="off",
            access_log=False,
            log_level="warning",
            proxy_headers=False,  # X-Forwarded-For is passed on, and added to, by the proxy itself
            server_header=False,
            date_header=False,
            backlog=min(BACKLOG, spare),  # so many are accepted before the first of them is counted
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.stop_s),
        ),
        protocol,
        leave_s_of(settings),
        has_successor=settings.backend == "local",
    )
    app.add(internal_handlers(settings, backend, reporter, lambda: server.is_leaving))
    management.reports.is_leaving = lambda: server.is_leaving
    listening = listen(settings.http)
    watch_lifeline(settings.lifeline_fd)
    async with contextlib.AsyncExitStack() as running:
        for part in parts:
            running.push_async_callback(part.stop)
            await part.start()
        if tracer is not None:
            running.push_async_callback(asyncio.to_thread, tracer.stop)
        settle_memory()
        tidying = asyncio.create_task(collect_young())
        running.callback(tidying.cancel)
        # The server raises again the signal that ended it, which would end us before the parts have stopped.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, _ended_already)
        await server.serve(sockets=[listening])


def leave_s_of(settings: GatewaySettings) -> float:
    """Seconds for which it stays after the signal."""
    if settings.leave_s is not None:
        return settings.leave_s
    return LEAVE_S if settings.backend == "kubernetes" else 0.0


def _ended_already(*_: object) -> None:
    """Takes a signal that was obeyed."""


def main() -> int:
    """Runs the gateway and returns the exit code."""
    one_heap()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(serve(GatewaySettings()))  # type: ignore[call-arg]  # fields come from the environment
    except (GatewayError, EndpointError, WireError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except ValidationError as error:
        for fault in faults_of(error):
            sys.stderr.write(f"{fault}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

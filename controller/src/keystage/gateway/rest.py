"""The management half of the OpenFaaS REST API, and Keystage's own, put together from the route table.

`faas-cli`, the command line and the live page call it; it calls the handlers of `gateway.rest_functions`,
`gateway.rest_system`, `gateway.rest_report` and `gateway.rest_page`. Every route needs credentials unless the
table says that it is open, and so does every path that is none. Refusals are plain text that names the thing,
the bound and the value. It must not proxy invocations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from keystage.gateway.auth import CHALLENGE, Credentials
from keystage.gateway.backend import Backend, GatewayError
from keystage.gateway.metrics import Metrics
from keystage.gateway.rest_functions import Functions
from keystage.gateway.rest_page import Page
from keystage.gateway.rest_report import Reports
from keystage.gateway.rest_system import System
from keystage.gateway.routes import MANAGEMENT, Route

Handler = Callable[[Request], Awaitable[Response]]


class Management:
    """Handlers over one backend.

    Args:
        backend: runs functions.
        metrics: counts invocations.
        override_s: seconds for which a person's scale request holds.

    Attributes:
        handlers: by name of their route.
        reports: those of the report, which end their streams when the gateway leaves.
    """

    def __init__(self, backend: Backend, metrics: Metrics, override_s: float) -> None:
        self.reports = Reports(backend)
        groups = (Functions(backend, metrics, override_s), System(backend, metrics), self.reports, Page())
        self.handlers: dict[str, Handler] = {}
        for route in MANAGEMENT:
            owner = next(group for group in groups if hasattr(group, route.name))
            self.handlers[route.name] = getattr(owner, route.name)


class _Path:
    """One path: dispatches by method, answers OPTIONS, refuses the others with `Allow`.

    Attributes:
        methods: what it takes.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self.methods = (*handlers, "OPTIONS")
        self._allow = ", ".join(self.methods)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        handler = self._handlers.get(scope["method"])
        if handler is not None:
            response = await handler(request)
        elif scope["method"] == "OPTIONS":
            response = Response(status_code=204, headers={"Allow": self._allow})
        else:
            text = f"{scope['path'][:200]} takes {self._allow}, not {scope['method'][:80]}\n"
            response = PlainTextResponse(text, 405, {"Allow": self._allow})
        await response(scope, receive, send)


class _Guard:
    """Asks for credentials before anything else looks at a request."""

    def __init__(self, app: ASGIApp, credentials: Credentials, is_open: frozenset[str]) -> None:
        self._app = app
        self._credentials = credentials
        self._open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            given = Request(scope).headers.get("authorization")
            if not self._credentials.admit(given):
                text = "credentials are missing or wrong\n"
                await PlainTextResponse(text, 401, {"WWW-Authenticate": CHALLENGE})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(
    management: Management, credentials: Credentials, routes: Iterable[Route] = MANAGEMENT
) -> FastAPI:
    """Puts the routes together."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    paths: dict[str, dict[str, Handler]] = {}
    for route in routes:
        methods = paths.setdefault(route.path, {})
        methods[route.method] = management.handlers[route.name]
        if route.method == "GET":
            methods["HEAD"] = management.handlers[route.name]
    for path, methods in paths.items():
        app.router.add_route(path, _Path(methods))  # type: ignore[arg-type]  # Starlette takes an ASGI application
    is_open = frozenset(route.path for route in routes if route.is_open)
    app.add_middleware(_Guard, credentials=credentials, is_open=is_open)

    @app.exception_handler(GatewayError)
    async def _refuse(_: Request, error: GatewayError) -> Response:
        # What is left of a body that is too large is not read: `rest_body` took a bounded part of it.
        headers = {"Connection": "close"} if error.status == 413 else None
        return PlainTextResponse(f"{error}\n", error.status, headers)

    @app.exception_handler(HTTPException)
    async def _unknown(request: Request, error: HTTPException) -> Response:
        text = f"{request.method[:80]} {request.url.path[:200]}: {error.detail}\n"
        return PlainTextResponse(text, error.status_code, error.headers)

    return app

"""Every HTTP route that changes something asks who is there, or stands in a table with the reason why not.

All applications are walked by their own tables; those that have none are looked at for the paths that their
code compares. What is open to everybody is `OPEN`: a new route that is neither refused nor in it fails here.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import inspect
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
from support.item_engine import limits_for, pipeline_for
from support.keysmanager_bundles import FilesBackend

from keystage.bundle.api import emulated
from keystage.controller.health import HealthServer
from keystage.gateway import internal
from keystage.gateway.auth import Credentials
from keystage.gateway.metrics import Metrics
from keystage.gateway.rest import Management, make_app
from keystage.gateway.routes import MANAGEMENT, ROUTES
from keystage.keysmanager import peer_server, pod_face
from keystage.keysmanager.pod_face import PodFace
from keystage.loadgen.sending.agent import Agent
from keystage.local.world import LocalWorld
from keystage.observability.board import Board
from keystage.router.api_keys import ApiKeys
from keystage.router.engine import Limits
from keystage.router.face import Face
from keystage.router.face_probe import HashEngine
from keystage.router.text import ByteText
from keystage.worker import http as worker_http
from keystage.worker.http import WorkerHttp
from keystage.worker.settings import Status

MUTATING = ("POST", "PUT", "PATCH", "DELETE")
CALL = "calls a function: who may call is the operator's ingress to say, as with OpenFaaS"
OPEN = {
    ("gateway", "/function/{name}"): CALL,
    ("gateway", "/function/{name}/{path}"): CALL,
    ("gateway", "/async-function/{name}"): CALL,
    ("gateway", "/async-function/{name}/{path}"): CALL,
    ("router without keys", "*"): "a call of a function; KEYSTAGE_API_KEYS asks who calls",
    ("worker", "/"): "a call of a function: computes one stage, keeps nothing",
}
TOKEN = "t" * 32
Answer = tuple[int, dict[str, str]]


def asked(app: Any, method: str, path: str, *headers: tuple[str, str]) -> Answer:
    """Status and headers of what an ASGI application answers to a request with a body of `{}`."""
    given = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": given,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def inside() -> None:
        async with asyncio.timeout(20):
            await app(scope, receive, send)

    asyncio.run(inside())
    start = sent[0]
    return start["status"], {name.decode().lower(): value.decode() for name, value in start["headers"]}


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


def compared(module: Any) -> set[str]:
    """Paths that an application without a table compares with: literals and constants."""
    source = inspect.getsource(module)
    names = re.findall(r'path (?:==|!=|in) \(?((?:"[^"]+"|[A-Z_]+)(?:, (?:"[^"]+"|[A-Z_]+))*)', source)
    words = [word for group in names for word in group.split(", ")]
    return {word.strip('"') if word.startswith('"') else getattr(module, word) for word in words}


def management() -> Any:
    return make_app(Management(cast("Any", None), Metrics(), 1.0), Credentials("user", "password"))


WRONG: Iterable[tuple[tuple[str, str], ...]] = (
    (),
    (("Authorization", ""),),
    (("Authorization", "Basic"),),
    (("Authorization", "Basic dXNlcjpwYXNzd29yZHg="),),  # user:passwordx
    (("Authorization", "Basic dXNlcjo="),),  # user:
    (("Authorization", "Basic OnBhc3N3b3Jk"),),  # :password
    (("Authorization", "Basic \u00e4"),),
    (("Authorization", "Bearer password"),),
    (("Authorization", f"Bearer {TOKEN[:-1]}"),),
    (("Authorization", f"Bearer {TOKEN}x"),),
    (("Authorization", "Bearer "),),
    (("Authorization", TOKEN),),
)


@pytest.mark.parametrize("headers", WRONG)
def test_gateway_management(headers: tuple[tuple[str, str], ...]) -> None:
    app = management()
    walked = 0
    for route in app.routes:
        path = route.path
        is_open = any(known.path == path and known.is_open for known in MANAGEMENT)
        for method in (*route.app.methods, *MUTATING):
            if is_open and method in (*MUTATING, "OPTIONS"):
                assert asked(app, method, filled(path), *headers)[0] in (204, 405)
            elif not is_open:
                status, told = asked(app, method, filled(path), *headers)
                assert (status, told["www-authenticate"][:5]) == (401, "Basic"), (method, path)
                walked += 1
    assert walked > 60
    for path in ("/system/none", "/none", "/system/functions/", "//system/functions", "/SYSTEM/functions"):
        for method in ("GET", *MUTATING):
            assert asked(app, method, path, *headers)[0] == 401, (method, path)


def test_what_the_gateway_leaves_open() -> None:
    found = {route.path for route in ROUTES if route.is_open and route.method in MUTATING}
    assert found == {path for app, path in OPEN if app == "gateway"}


@pytest.mark.parametrize("headers", WRONG)
def test_gateway_internal(headers: tuple[tuple[str, str], ...]) -> None:
    app = internal.Internal(cast("Any", None), list, Board(), TOKEN, lambda: False)
    assert {prefix.decode() for prefix in internal.PREFIXES} == {
        internal.LIVE, internal.READY, internal.LOADS_PATH, internal.REPORT_PATH,
    }  # fmt: skip
    for path in (internal.LOADS_PATH, internal.REPORT_PATH):
        for method in ("GET", *MUTATING):
            assert asked(app, method, path, *headers)[0] in (401, 405), (method, path)
    assert asked(app, "PUT", internal.REPORT_PATH, *headers)[0] == 401
    for method in MUTATING:
        assert asked(app, method, internal.LIVE, *headers)[0] == 405


def faces() -> list[Any]:
    single = Limits(looping=False, context_length=0, vocab_size=256, max_body_bytes=1000)
    looping = Limits(looping=True, context_length=64, vocab_size=256, max_body_bytes=1000)
    bert = pipeline_for("bert", "embeddings", architectures=["BertModel"])
    return [
        (looping, emulated("tiny", 2, execution="looping", context_length=64)),
        (single, emulated("pass", 2, execution="single-pass")),
        (limits_for(bert), bert),
    ]


@pytest.mark.parametrize("headers", WRONG)
def test_router_with_keys(tmp_path: Path, headers: tuple[tuple[str, str], ...]) -> None:
    file = tmp_path / "keys"
    file.write_text(f"tenant {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    keys = ApiKeys(file)
    keys.load()
    for limits, pipeline in faces():
        app = Face(
            HashEngine(limits), pipeline, ByteText(), lambda: b"{}", lambda: True, lambda: True, keys=keys
        )
        walked = 0
        for path, methods in app.served.items():
            for method in methods & set(MUTATING):
                assert asked(app, method, filled(path), *headers)[0] == 401, (method, path)
                walked += 1
        assert walked >= 4
        if not headers:
            good = ("Authorization", f"Bearer {TOKEN}")
            assert asked(app, "GET", "/v1/models", good)[0] == 200
            assert asked(app, "POST", "/v1/completions", good)[0] == 400


@pytest.mark.parametrize("headers", WRONG)
def test_worker_and_stage_pod(headers: tuple[tuple[str, str], ...]) -> None:
    worker = WorkerHttp(Status(), "p", "r")
    paths = compared(worker_http)
    assert len(paths) == 6
    for app in (worker, WorkerHttp(Status(), "p", "r", worker_http.bearer_of(TOKEN))):
        for path in paths - {"/"}:
            for method in MUTATING:
                status, _ = asked(app, method, path, *headers)
                # Paths that only tell do so whatever the method; the one that changes something refuses.
                assert status != 202, (method, path)
                if path == worker_http.THREADS_PATH:
                    assert status == (401 if method == "PUT" else 405)
    assert ("worker", "/") in OPEN
    parked, working = PodFace(TOKEN), PodFace("")
    assert compared(pod_face) >= {pod_face.ACTIVATE_PATH}
    assert asked(parked, "POST", pod_face.ACTIVATE_PATH, *headers)[0] == 401
    assert asked(working, "POST", pod_face.ACTIVATE_PATH, *headers)[0] == 404
    good = ("Authorization", f"Bearer {TOKEN}")
    assert asked(parked, "POST", pod_face.ACTIVATE_PATH, good)[0] == 400  # it came in, and `{}` is none


def test_controller_health_changes_nothing() -> None:
    server = HealthServer(0, lambda: "", lambda: "", lambda: b"")
    server.start()
    try:
        for method in MUTATING:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request(method, "/healthz", b"{}")
            assert connection.getresponse().status == 501
            connection.close()
    finally:
        server.stop()


def aiohttp_routes(app: Any) -> set[tuple[str, str]]:
    return {(route.method, route.resource.canonical) for route in app.router.routes()}


async def _statuses(runner: Any, routes: Iterable[tuple[str, str]], headers: Any) -> dict[Any, int]:
    import aiohttp

    (host, port), *_ = runner.addresses
    found = {}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for method, path in routes:
            async with session.request(method, filled(path), data=b"{}", headers=dict(headers)) as answer:
                found[method, path] = answer.status
    return found


@pytest.mark.parametrize("headers", [one for one in WRONG if "\u00e4" not in str(one)])
def test_keysmanager_and_load_agent(headers: tuple[tuple[str, str], ...]) -> None:
    import socket

    from aiohttp import web

    async def inside() -> None:
        app = peer_server.make_app(FilesBackend({}), TOKEN)
        runner = await peer_server.start(app, socket.create_server(("127.0.0.1", 0)))
        routes = aiohttp_routes(app)
        assert {("PUT", "/v1/grants"), ("PUT", "/v1/key-stages"), ("POST", "/v1/invalidate")} <= routes
        try:
            found = await _statuses(runner, [*routes, ("POST", "/none"), ("DELETE", "/v1/status")], headers)
        finally:
            await runner.cleanup()
        assert set(found.values()) == {401}, found
        agent = Agent(TOKEN).app()
        runner = web.AppRunner(agent)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            found = await _statuses(runner, aiohttp_routes(agent) - {("HEAD", "/run")}, headers)
        finally:
            await runner.cleanup()
        assert found == {("GET", "/run"): 401}

    asyncio.run(inside())


def test_what_has_no_credentials_is_the_users_own_by_the_file_system(tmp_path: Path) -> None:
    """The supervisor's socket and the KeysManager's: mode 0600 in a folder of mode 0700."""

    async def inside() -> None:
        async with LocalWorld(tmp_path / "state", gateway_port=None, controller=False) as world:
            assert stat.S_IMODE(world.home.path.stat().st_mode) == 0o700
            assert stat.S_IMODE(world.home.run.stat().st_mode) == 0o700
            sockets = [file for file in world.home.run.rglob("*") if stat.S_ISSOCK(file.stat().st_mode)]
            assert {file.name for file in sockets} >= {"up.sock"}
            for file in sockets:
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            for file in world.home.credentials.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    asyncio.run(inside())

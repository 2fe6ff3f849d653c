"""Worlds for the platform contract: a scripted supervisor on a UNIX socket, and the real one."""

from __future__ import annotations

import asyncio
import http.server
import socketserver
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keystage.controller.domain.platform import Platform
from keystage.controller.platforms.local import LocalPlatform
from keystage.local.api import (
    Cpu,
    Deployment,
    Desired,
    FunctionRecord,
    Intent,
    KeyStageList,
    NodeRecord,
    ReplicaRecord,
)
from keystage.local.world import LocalWorld
from keystage.router.api import RouterStats


class World(Protocol):
    """What the contract needs of a world beside its platform."""

    platform: Platform
    has_intents: bool  # overrides and wakes: a stock OpenFaaS gateway has no place for them

    def deploy(self, deployment: Deployment) -> None: ...
    def intend(self, function: str, intent: Intent) -> None: ...
    def record(self, function: str) -> FunctionRecord: ...
    def end(self) -> None: ...


class ScriptedWorld:
    """The supervisor's HTTP interface over records that a test may change."""

    has_intents = True

    def __init__(self, folder: Path) -> None:
        self.functions: dict[str, FunctionRecord] = {}
        self.replicas: list[ReplicaRecord] = []
        self.stats: dict[str, RouterStats | bytes] = {}
        self.nodes: list[NodeRecord] = []
        self.key_stages: dict[str, tuple[int, ...]] = {}
        socket_path = folder / "up.sock"
        self._servers: list[socketserver.BaseServer] = []
        self._serve(_UnixServer(str(socket_path), self._control_handler()))
        self._router = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._router_handler())
        self._serve(self._router)
        self.platform = LocalPlatform(socket_path, folder, timeout_s=1.0)
        self.home = folder

    @property
    def router_address(self) -> str:
        return f"127.0.0.1:{self._router.server_address[1]}"

    def deploy(self, deployment: Deployment) -> None:
        self.functions[deployment.service] = FunctionRecord(deployment=deployment, created_at_s=time.time())

    def intend(self, function: str, intent: Intent) -> None:
        record = self.functions[function]
        for name in ("override", "wake"):
            value = getattr(intent, name)
            if value is not msgspec.UNSET:
                record = msgspec.structs.replace(record, **{name: value})
        self.functions[function] = record

    def record(self, function: str) -> FunctionRecord:
        return self.functions[function]

    def end(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []

    def _serve(self, server: socketserver.BaseServer) -> None:
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def _control_handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        world = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                answers: dict[str, Any] = {
                    "/functions": list(world.functions.values()),
                    "/replicas": world.replicas,
                    "/nodes": world.nodes,
                }
                self.answer(200, msgspec.json.encode(answers[self.path]))

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/key-stages":
                    told = msgspec.json.decode(body, type=KeyStageList)
                    world.key_stages[told.pipeline] = told.stages
                    self.answer(200, b"{}")
                    return
                _, _, name, what = self.path.split("/")
                if name not in world.functions:
                    self.answer(404, b'{"error": "unknown"}')
                elif what == "replicas":
                    desired = msgspec.json.decode(body, type=Desired).replicas
                    world.functions[name] = msgspec.structs.replace(world.functions[name], desired=desired)
                    self.answer(200, b"{}")
                elif what == "cpu":
                    cores = msgspec.json.decode(body, type=Cpu).cores
                    world.functions[name] = msgspec.structs.replace(world.functions[name], cores=cores)
                    self.answer(200, b"{}")
                else:
                    world.intend(name, msgspec.json.decode(body, type=Intent))
                    self.answer(200, b"{}")

        return Handler

    def _router_handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        world = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                told = world.stats.get("router")
                if self.path != "/_/stats" or told is None:
                    self.answer(503, b"{}")
                else:
                    self.answer(200, told if isinstance(told, bytes) else msgspec.json.encode(told))

        return Handler


class _Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: Any) -> None:
        pass


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class SupervisedWorld:
    """The real supervisor, run by an event loop in a thread."""

    has_intents = True

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._local = LocalWorld(folder / "home", gateway_port=None, controller=False)
        self._call(self._local.__aenter__())
        self._is_up = True
        self.platform = LocalPlatform(self._local.home.control, self._local.home.path, timeout_s=5.0)

    def deploy(self, deployment: Deployment) -> None:
        self._call(self._local.deploy(deployment))

    def intend(self, function: str, intent: Intent) -> None:
        from keystage.local.events import Intended

        async def handle() -> None:
            self._local.supervisor.handle(Intended(function, intent))

        self._call(handle())

    def record(self, function: str) -> FunctionRecord:
        return self._local.function(function)

    def end(self) -> None:
        if self._is_up:
            self._is_up = False
            self._call(self._local.__aexit__(None, None, None))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)
            self._loop.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

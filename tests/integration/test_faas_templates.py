"""The faas-cli templates: their build contexts are whole, and the plain function's server serves."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from support.local_function import PYTHON, authorization
from support.processes import WAIT_S, wait_for

from keystage.local.world import LocalWorld

TEMPLATES = Path(__file__).parents[2] / "stage-function" / "template"
LANGUAGES = ("keystage-function", "keystage-router", "keystage-stage")
HANDLER = """
import os
import threading
import time

go = threading.Event()
closed, begun = [], []

def handle(event):
    if event.path == "/json":
        return {"method": event.method, "query": event.query, "kind": event.headers["content-type"],
                "body": event.json()}
    if event.path == "/bytes":
        return event.body[::-1]
    if event.path == "/tuple":
        return "made\\n", 201, {"X-Made": "yes", "Content-Type": "text/x-made"}
    if event.path == "/secret":
        return event.secret("api-key")
    if event.path == "/go":
        go.set()
        return None
    if event.path == "/stream":
        return pieces()
    if event.path == "/cut":
        return cut()
    if event.path == "/endless":
        return endless()
    if event.path == "/closed":
        return closed
    if event.path == "/wait":
        begun.append("wait")
        until_s = time.monotonic() + 20
        while not os.path.exists("go") and time.monotonic() < until_s:
            time.sleep(0.01)
        return "waited"
    if event.path == "/begun":
        return begun
    return event.text().upper() if event.path == "/" else 1 / 0

def pieces():
    yield "one\\n"
    go.wait(20)
    yield b"two\\n"
    yield {"three": 3}

def cut():
    yield "half"
    raise RuntimeError("no more")

def endless():
    try:
        while True:
            yield "x"
            time.sleep(0.01)
    finally:
        closed.append("endless")
"""


def build_context(folder: Path, language: str, handler: str | None = None) -> Path:
    """What `faas-cli build --shrinkwrap` makes: the template, with the handler's folder laid over it."""
    context = folder / "build" / "mine"
    shutil.copytree(TEMPLATES / language, context)
    if handler is not None:
        (context / "function" / "handler.py").write_text(handler)
    return context


@pytest.mark.parametrize("language", LANGUAGES)
def test_build_context_has_what_the_dockerfile_takes(language: str, tmp_path: Path) -> None:
    context = build_context(tmp_path, language)
    template = yaml.safe_load((context / "template.yml").read_text())
    assert template["language"] == language
    assert template["fprocess"]
    assert template["welcome_message"]
    dockerfile = (context / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in dockerfile if line and not line.startswith("#")]
    sources = [source for step in steps if step[0] == "COPY" for source in step[1:-1]]
    assert {"index.py", "function/"} <= set(sources)
    assert [source for source in sources if not (context / source).exists()] == []
    assert ["USER", "12000:12000"] in steps
    assert ["EXPOSE", "8080"] in steps
    assert steps[-1][0] == "CMD"
    assert (context / "function" / "handler.py").exists()
    assert (context / "function" / "requirements.txt").exists()


@pytest.mark.parametrize(("language", "part"), [("keystage-stage", "worker"), ("keystage-router", "router")])
def test_images_of_a_pipeline_become_the_very_program(language: str, part: str, tmp_path: Path) -> None:
    context = build_context(tmp_path, language)
    # Without its settings the program ends with what it lacks: that it is the right one shows there.
    done = subprocess.run(
        [sys.executable, "index.py"],
        cwd=context,
        env={k: v for k, v in os.environ.items() if not k.startswith("KEYSTAGE_")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert f"keystage {part}: " in done.stderr
    assert "KEYSTAGE_PIPELINE is missing" in done.stderr
    assert "\nreplica\n" not in done.stderr  # it was named after the host


class Server:
    """A running function."""

    def __init__(self, folder: Path, handler: str, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        self.folder = build_context(folder, "keystage-function", handler)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "index.py"],
                cwd=self.folder,
                env={**os.environ, "PORT": str(self.port), **env},
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: self.ready() == 200 or self.process.poll() is not None, "the function is ready")
        assert self.process.poll() is None, self.log.read_text()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def ask(
        self, path: str, body: bytes | None = None, method: str = "POST"
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = self.connect()
        try:
            connection.request(method, path, body, {"Content-Type": "text/plain"})
            answer = connection.getresponse()
            return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def ready(self) -> int:
        """Status of /_/ready, 0 where nobody listens."""
        try:
            return self.ask("/_/ready", method="GET")[0]
        except OSError:
            return 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "api-key").write_text("s3cret")
    running = Server(
        tmp_path,
        HANDLER,
        secret_mount_path=str(tmp_path / "secrets"),
        MAX_BODY_BYTES="1000",
        LINGER_S="2",
    )
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.wait(WAIT_S)


def test_handler_s_results_become_answers(server: Server) -> None:
    assert server.ask("/_/health", method="GET")[:2] == (200, b"ok\n")
    assert server.ask("/", b"shout")[:2] == (200, b"SHOUT")
    status, body, headers = server.ask("/json?a=1&b=", b"[1]", method="PUT")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "method": "PUT",
        "query": {"a": "1", "b": ""},
        "kind": "text/plain",
        "body": [1],
    }
    status, body, headers = server.ask("/bytes", b"\x00\xff")
    assert (status, body, headers["content-type"]) == (200, b"\xff\x00", "application/octet-stream")
    status, body, headers = server.ask("/tuple", b"")
    assert (status, body, headers["x-made"], headers["content-type"]) == (
        201,
        b"made\n",
        "yes",
        "text/x-made",
    )
    assert server.ask("/secret", b"")[:2] == (200, b"s3cret")
    assert server.ask("/go", b"")[:2] == (200, b"")
    status, body, _ = server.ask("/", b"x" * 1001)
    assert (status, body) == (413, b"the body is larger than 1000 bytes\n")
    status, body, _ = server.ask("/fails", b"")
    assert (status, body) == (500, b"the handler failed: see the function's logs\n")
    assert "ZeroDivisionError" in server.log.read_text()


def test_generators_are_sent_piece_by_piece(server: Server) -> None:
    connection = server.connect()
    connection.request("POST", "/stream", b"")
    answer = connection.getresponse()
    assert answer.readline() == b"one\n"  # here before the second piece may be made
    assert server.ask("/go", b"")[0] == 200
    assert answer.read() == b'two\n{"three": 3}'
    connection.close()
    connection = server.connect()
    connection.request("POST", "/cut", b"")
    with pytest.raises(http.client.IncompleteRead):
        connection.getresponse().read()
    connection.close()


def test_generator_of_a_client_that_left_is_closed(server: Server) -> None:
    connection = server.connect()
    connection.request("POST", "/endless", b"")
    answer = connection.getresponse()
    assert answer.read(1) == b"x"
    answer.close()
    connection.close()
    wait_for(lambda: json.loads(server.ask("/closed", b"")[1]) == ["endless"], "the generator is closed")


def test_sigterm_finishes_what_is_in_hand(server: Server) -> None:
    answers: list[tuple[int, bytes]] = []
    caller = threading.Thread(target=lambda: answers.append(server.ask("/wait", b"")[:2]))
    caller.start()
    wait_for(lambda: json.loads(server.ask("/begun", b"")[1]) == ["wait"], "the request is in hand")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.ready() == 503, "it says that it is not ready")
    assert server.ask("/_/health", method="GET")[0] == 200
    assert server.ask("/", b"late")[:2] == (200, b"LATE")
    wait_for(lambda: server.ready() == 0, "it takes no new connections")
    assert (server.process.poll(), answers) == (None, [])
    (server.folder / "go").touch()
    caller.join(WAIT_S)
    assert answers == [(200, b"waited")]
    assert server.process.wait(WAIT_S) == 0


def test_function_runs_under_the_local_gateway_by_its_fprocess(tmp_path: Path) -> None:
    context = build_context(tmp_path, "keystage-function", HANDLER)
    deployment = {
        "service": "mine",
        "image": "example/mine:latest",
        "envProcess": f"{PYTHON} {context / 'index.py'}",
        "secrets": ["api-key"],
    }

    async def work() -> None:
        async with (
            asyncio.timeout(60),
            LocalWorld(tmp_path / "state", controller=False) as world,
            aiohttp.ClientSession(world.gateway_url, headers=authorization(*world.credentials)) as session,
        ):
            secret = {"name": "api-key", "value": "s3cret"}
            async with session.post("/system/secrets", json=secret) as answer:
                assert answer.status == 202
            async with session.post("/system/functions", json=deployment) as answer:
                assert answer.status == 202
            async with session.post("/function/mine/secret") as answer:
                assert (answer.status, await answer.text()) == (200, "s3cret")
            async with session.post("/function/mine/stream") as answer:
                assert await answer.content.readline() == b"one\n"
                async with session.post("/function/mine/go") as go:
                    assert go.status == 200
                assert await answer.content.read() == b'two\n{"three": 3}'

    asyncio.run(work())

"""The gateway's view of functions: whatever the supervisor answers, it is asked again, and its age shows."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support.local_function import function

from keystage.gateway.auth import Credentials
from keystage.gateway.backend import BackendUnavailable
from keystage.gateway.local import LocalBackend
from keystage.gateway.metrics import Metrics
from keystage.gateway.rest import Management, make_app
from keystage.local.api import FunctionRecord, View


class Supervisor:
    """Answers `GET /watch` as told.

    Attributes:
        answers: what it gives next: (status, body); the last one for ever.
        asked: the queries so far.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[str] = []

    async def watch(self, request: web.Request) -> web.Response:
        self.asked.append(request.query_string)
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await asyncio.sleep(0.001)
        return web.Response(status=status, body=body)


def view(version: int, *names: str, incarnation: str = "i") -> tuple[int, bytes]:
    records = [FunctionRecord(deployment=function(name), created_at_s=1.0) for name in names]
    told = View(version=version, incarnation=incarnation, functions=records, replicas=[])
    return 200, msgspec.json.encode(told)


def run(tmp_path: Path, work: Callable[[LocalBackend, Supervisor], Awaitable[None]]) -> None:
    async def inside() -> None:
        supervisor = Supervisor()
        supervisor.answers = [view(7, "a")]
        app = web.Application()
        app.router.add_get("/watch", supervisor.watch)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        backend = LocalBackend(tmp_path / "s")
        try:
            await backend.start()
            async with asyncio.timeout(20):
                await work(backend, supervisor)
        finally:
            await backend.stop()
            await runner.cleanup()

    asyncio.run(inside())


async def health(app: Callable[..., Awaitable[None]]) -> tuple[int, str]:
    """`GET /healthz` without credentials: (status, text)."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/healthz", "raw_path": b"/healthz", "headers": []}
    await app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "bad",
    [
        (400, b'{"error": "since"}'),
        (404, b""),
        (412, b""),
        (500, b"x"),
        (200, b"{"),
        (200, b'{"version": "x"}'),
    ],
)
def test_no_answer_of_the_supervisor_ends_the_following(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: tuple[int, bytes]
) -> None:
    caplog.set_level(logging.INFO, "keystage.gateway.local")

    async def work(backend: LocalBackend, supervisor: Supervisor) -> None:
        assert [state.deployment.service for state in backend.functions()] == ["a"]
        supervisor.answers = [bad, bad, view(8, "a", "b")]
        await until(lambda: len(backend.functions()) == 2)
        await until(lambda: "fresh again, after 2 failures" in caplog.text)
        assert [r.getMessage()[:13] for r in caplog.records if r.levelno == logging.WARNING] == [
            "view is stale"
        ]

    run(tmp_path, work)


def test_a_supervisor_that_started_anew_is_asked_for_everything(tmp_path: Path) -> None:
    async def work(backend: LocalBackend, supervisor: Supervisor) -> None:
        await until(lambda: "since=7" in supervisor.asked)
        supervisor.answers = [(500, b""), view(1, "c", incarnation="j")]
        del supervisor.asked[:]
        await until(lambda: [state.deployment.service for state in backend.functions()] == ["c"])
        await until(lambda: "since=1" in supervisor.asked)
        assert supervisor.asked[supervisor.asked.index("since=1") - 1] == "since=0"

    run(tmp_path, work)


def test_a_write_whose_view_cannot_be_read_is_told_as_503(tmp_path: Path) -> None:
    async def work(backend: LocalBackend, supervisor: Supervisor) -> None:
        supervisor.answers = [(200, b"{")]
        with pytest.raises(BackendUnavailable, match="the supervisor's view cannot be read"):
            await backend._refresh()

    run(tmp_path, work)


def test_health_is_503_while_the_view_is_too_old_and_names_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keystage.gateway.rest_system.STALE_S", 1.0)

    async def work(backend: LocalBackend, supervisor: Supervisor) -> None:
        app = make_app(Management(backend, Metrics(), 1.0), Credentials("a", "b"))
        while await health(app) != (200, "ok\n"):  # looked at within a second of the last answer
            await asyncio.sleep(0)
        supervisor.answers = [(400, b"")]
        while (told := await health(app))[0] == 200:
            await asyncio.sleep(0.02)
        assert backend.view_age_s() > 1.0
        assert told[0] == 503
        assert re.search(r"view of functions and replicas is \d+ s old, at most 1 s", told[1])
        assert [state.deployment.service for state in backend.functions()] == ["a"]  # it is still used
        supervisor.answers = [view(7, "a")]  # unchanged is fresh as well
        while (told := await health(app))[0] == 503:
            await asyncio.sleep(0.02)
        assert told == (200, "ok\n")

    run(tmp_path, work)

"""What every gateway backend must do, run over each of them.

A backend joins by a harness: a running world, and how a controller there sets replica numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from support.local_function import PYTHON, function

from keystage.gateway.backend import Backend, BackendUnavailable, BadRequest, UnknownFunction
from keystage.gateway.local import LocalBackend
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

Scale = Callable[[str, int], Awaitable[None]]


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[tuple[Backend, Scale]]:
    async with LocalWorld(folder / "state", gateway_port=None, controller=False) as world:
        backend = LocalBackend(world.home.control)
        await backend.start()
        try:
            yield backend, world.scale
        finally:
            await backend.stop()


HARNESSES = {"local": local}


@pytest.fixture(params=sorted(HARNESSES))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    def go(work: Callable[[Backend, Scale], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with asyncio.timeout(60), HARNESSES[request.param](tmp_path) as (backend, scale):
                await work(backend, scale)

        asyncio.run(inside())

    return go


async def until(backend: Backend, condition: Callable[[], bool]) -> None:
    while not condition():
        await backend.changed(5.0)


def test_writes_are_seen_by_the_next_read(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        assert backend.functions() == []
        await backend.put(function("b"))
        await backend.put(function("a"))
        assert [s.deployment.service for s in backend.functions()] == ["a", "b"]
        assert backend.get("a").deployment == function("a")
        await backend.put(function("a", COLOUR="blue"))
        assert backend.get("a").deployment.envVars == {"COLOUR": "blue"}
        await backend.delete("a")
        assert [s.deployment.service for s in backend.functions()] == ["b"]

    run(work)


def test_ready_replicas_can_be_called_and_their_number_follows(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        await until(backend, lambda: len(backend.get("echo").ready) == 1)
        await scale("echo", 2)
        await until(backend, lambda: len(backend.get("echo").ready) == 2)
        assert backend.get("echo").replicas == 2
        async with aiohttp.ClientSession() as session:
            for endpoint in backend.get("echo").ready:
                async with session.get(f"http://{endpoint.address}/") as answer:
                    assert (await answer.json())["replica"] == endpoint.replica
        await scale("echo", 0)
        await until(backend, lambda: not backend.get("echo").ready)
        assert backend.get("echo").replicas == 0

    run(work)


def test_intents_show(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        await scale("echo", 0)
        await backend.wake("echo")
        await until(backend, lambda: backend.get("echo").waking)
        await backend.override("echo", 3, time.time() + 60)
        assert backend.get("echo").replicas == 3
        await backend.override("echo", 3, time.time() - 1)
        assert backend.get("echo").replicas == 0

    run(work)


def test_logs_come_in_order_and_are_cut_from_the_front(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        talk = PYTHON + " -c \"print('one'); print('two|2'); print('three'); import time; time.sleep(60)\""
        await backend.put(Deployment(service="talk", envProcess="env PYTHONUNBUFFERED=1 " + talk))
        lines = await backend.logs("talk", tail=None, since_s=0.0)
        while len(lines) < 3:
            await asyncio.sleep(0.02)
            lines = await backend.logs("talk", tail=None, since_s=0.0)
        assert [line.text for line in lines] == ["one", "two|2", "three"]
        assert {line.replica for line in lines} == {"talk-0"}
        assert await backend.logs("talk", tail=1, since_s=0.0) == lines[-1:]
        assert await backend.logs("talk", tail=None, since_s=lines[-1].at_s) == []

    run(work)


def test_what_cannot_be_is_refused_by_name(run: Callable[..., None]) -> None:
    async def work(backend: Backend, scale: Scale) -> None:
        await backend.put(function())
        with pytest.raises(BadRequest, match="Upper"):
            await backend.put(function("Upper"))
        with pytest.raises(BadRequest, match="not -1"):
            await backend.override("echo", -1, time.time() + 60)
        for call in (
            backend.delete("no"),
            backend.wake("no"),
            backend.override("no", 1, time.time() + 60),
            backend.logs("no", tail=None, since_s=0.0),
        ):
            with pytest.raises(UnknownFunction, match="function no "):
                await call
        with pytest.raises(UnknownFunction, match="function no "):
            backend.get("no")

    run(work)


def test_a_backend_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.gateway.local.START_S", 0.1)

    async def inside() -> None:
        with pytest.raises(BackendUnavailable, match=r"no\.sock"):
            await LocalBackend(tmp_path / "no.sock").start()

    asyncio.run(inside())

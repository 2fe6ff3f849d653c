"""The controller's report through every backend: none yet, the newest at once, the next one when it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from support.gateway_cluster import fake_cluster

from keystage.gateway.backend import Backend
from keystage.gateway.kubernetes import KubernetesBackend
from keystage.gateway.local import LocalBackend
from keystage.local.world import LocalWorld
from keystage.observability.api import Report

Put = Callable[[bytes], bool]


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[tuple[Backend, Put]]:
    async with LocalWorld(folder / "state", gateway_port=None, controller=False) as world:
        backend = LocalBackend(world.home.control)
        await backend.start()
        try:
            yield backend, world.supervisor.reports.put
        finally:
            await backend.stop()


@asynccontextmanager
async def kubernetes(_: Path) -> AsyncIterator[tuple[Backend, Put]]:
    cluster = fake_cluster()
    played = await asyncio.to_thread(cluster.__enter__)
    try:
        backend = KubernetesBackend(played.cluster)
        await backend.start()
        try:
            yield backend, backend.reports.put
        finally:
            await backend.stop()
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


HARNESSES = {"local": local, "kubernetes": kubernetes}
Work = Callable[[Backend, Put], Awaitable[None]]


@pytest.fixture(params=list(HARNESSES))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Work], None]:
    def go(work: Work) -> None:
        async def inside() -> None:
            async with asyncio.timeout(60), HARNESSES[request.param](tmp_path) as (backend, put):
                await work(backend, put)

        asyncio.run(inside())

    return go


def body(number: int, controller: str = "a&b=c d", at_s: float = 1.0) -> bytes:
    return msgspec.json.encode(Report(controller=controller, number=number, at_s=at_s))


def test_there_is_none_until_the_first_comes(run: Callable[[Work], None]) -> None:
    async def work(backend: Backend, put: Put) -> None:
        assert await backend.report(None, 0.0) is None
        waiting = [asyncio.create_task(backend.report(None, 30.0)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        put(body(1))
        assert await asyncio.gather(*waiting) == [body(1)] * 5

    run(work)


def test_the_newest_comes_at_once_and_the_next_when_it_is_there(run: Callable[[Work], None]) -> None:
    async def work(backend: Backend, put: Put) -> None:
        put(body(1))
        assert await backend.report(None, 0.0) == body(1)
        assert await backend.report(("a&b=c d", 1), 0.0) is None
        assert await backend.report(("other", 1), 0.0) == body(1)
        waiting = asyncio.create_task(backend.report(("a&b=c d", 1), 30.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        put(body(2))
        assert await waiting == body(2)
        put(body(1, "new", at_s=2.0))
        assert await backend.report(("a&b=c d", 2), 30.0) == body(1, "new", at_s=2.0)

    run(work)


def test_a_large_report_arrives_whole(run: Callable[[Work], None]) -> None:
    async def work(backend: Backend, put: Put) -> None:
        large = msgspec.json.encode(Report(controller="a", number=1, at_s=1.0, trouble="x" * (6 << 20)))
        put(large)
        assert await backend.report(None, 30.0) == large

    run(work)

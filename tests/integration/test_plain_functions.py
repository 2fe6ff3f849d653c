"""Plain functions under gateway and controller, as processes: to zero, back by a request, and by load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.local_function import authorization, function

from keystage.controller.decisions import replay
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

Work = Callable[[LocalWorld, aiohttp.ClientSession], Awaitable[None]]
P = "com.openfaas.scale."


def run(tmp_path: Path, work: Work, **env: str) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=True, env=env) as world,
            aiohttp.ClientSession(world.gateway_url, headers=authorization(*world.credentials)) as session,
        ):
            await work(world, session)
            assert world.gateway is not None
            assert world.controller is not None
            assert (world.gateway.restarts, world.controller.restarts) == (0, 0)

    asyncio.run(inside())
    count, differences = replay(tmp_path / "state" / "decisions.jsonl")
    assert count > 0
    assert differences == []


def labelled(**labels: str) -> Deployment:
    scale = {P + name.replace("_", "-"): value for name, value in labels.items()}
    return msgspec.structs.replace(function(), labels=scale)


async def deploy(session: aiohttp.ClientSession, deployment: Deployment) -> None:
    async with session.post("/system/functions", data=msgspec.json.encode(deployment)) as answer:
        assert answer.status == 202, await answer.text()


async def call(session: aiohttp.ClientSession, path: str = "") -> str:
    async with session.get("/function/echo" + path) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return text


async def until(world: LocalWorld, condition: Callable[[], bool]) -> None:
    while not condition():
        await world.supervisor.watch(world.supervisor.view().version, 1.0)


@pytest.mark.slow
def test_to_zero_when_nothing_comes_never_at_work_and_back_by_a_request(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await deploy(session, labelled(zero="true", zero_duration="2s"))
        first = await call(session, "/slow?s=0")
        idle_since_s = time.monotonic()
        await until(world, lambda: world.function("echo").desired == 0 and not world.replicas("echo"))
        assert time.monotonic() - idle_since_s >= 2.0
        async with session.get("/system/function/echo") as answer:
            assert (await answer.json())["replicas"] == 0
        second = await call(session, "/slow?s=5")  # wakes it, and keeps it up longer than it may be idle
        assert second != first
        assert [r.replica for r in world.replicas("echo") if r.state == "ready"] == [second]
        await until(world, lambda: world.function("echo").desired == 0 and not world.replicas("echo"))
        answers = await asyncio.gather(*(call(session, "/slow?s=0") for _ in range(50)))
        assert len(set(answers)) == 1  # one cold start for all of them

    run(tmp_path, work)


def test_capacity_follows_what_is_in_flight_up_and_down(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await deploy(
            session, labelled(max="3", type="capacity", target="2", target_proportion="1", zero="false")
        )
        await call(session)
        assert world.function("echo").desired in (None, 1)
        stop = asyncio.Event()

        served: set[str] = set()

        async def load() -> None:
            while not stop.is_set():
                served.add(await call(session, "/slow?s=0.3"))

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(load())
            await until(world, lambda: world.function("echo").desired == 3)
            await world.wait_ready("echo", 3)
            while len(served) < 3:
                await asyncio.sleep(0.05)
            stop.set()
        await until(world, lambda: world.function("echo").desired == 1)

    run(tmp_path, work, KEYSTAGE_POLICY='{"hold_s": 1.0}')

"""No request at a plain function fails because its replica is given back, replaced, removed or busy.

With programs that end at once on SIGTERM, behind a real gateway.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.local_function import PYTHON, authorization

from keystage.local.api import Deployment
from keystage.local.ledger import Bounds
from keystage.local.world import LocalWorld

Work = Callable[[LocalWorld, aiohttp.ClientSession], Awaitable[None]]
SCRIPT = shlex.quote(str(Path(__file__).parents[1] / "support" / "abrupt_function.py"))
CLIENTS = 6
SLOW_S = 1.5
"""Several times as long as a replica that left the routing is let alone anyhow."""


def abrupt(more: str = "", **envs: str) -> Deployment:
    return Deployment(service="echo", image="none", envProcess=f"{PYTHON} {SCRIPT} $PORT{more}", envVars=envs)


def run(tmp_path: Path, work: Work, bounds: Bounds) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(60),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False, bounds=bounds) as world,
            aiohttp.ClientSession(world.gateway_url, headers=authorization(*world.credentials)) as session,
        ):
            await work(world, session)

    asyncio.run(inside())


async def call(session: aiohttp.ClientSession, seconds: float = SLOW_S) -> tuple[int, str]:
    async with session.get(f"/function/echo/{seconds}") as answer:
        return answer.status, await answer.text()


async def begun(session: aiohttp.ClientSession, calls: int) -> None:
    """Waits until the gateway has so many calls, ended ones included, and their replicas may have them."""
    wanted = f'gateway_function_invocation_started{{function_name="echo.openfaas-fn"}} {calls}.0'
    while True:
        async with session.get("/metrics") as answer:
            if wanted in (await answer.text()).splitlines():
                break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


async def until(world: LocalWorld, condition: Callable[[], bool]) -> None:
    while not condition():
        await world.supervisor.watch(world.supervisor.view().version, 1.0)


def names(world: LocalWorld) -> set[str]:
    return {replica.replica for replica in world.replicas("echo")}


def test_no_request_fails_when_replicas_are_given_back_replaced_and_removed(
    tmp_path: Path,
) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(abrupt())
        await world.scale("echo", 3)
        await world.wait_ready("echo", 3)
        answers: list[tuple[int, str]] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                answers.append(await call(session))

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(load())
            while len({name for _, name in answers}) < 3:
                await asyncio.sleep(0.02)
            await asyncio.sleep(SLOW_S / 3)  # into the next round
            await world.scale("echo", 1)
            await until(world, lambda: len(names(world)) == 1)
            old = names(world)
            async with session.put("/system/functions", data=msgspec.json.encode(abrupt(MORE="1"))) as answer:
                assert answer.status == 202, await answer.text()
            await until(world, lambda: not old & names(world))
            stop.set()
        assert Counter(status for status, _ in answers) == {200: len(answers)}
        assert {name for _, name in answers} > old

        last = [asyncio.create_task(call(session)) for _ in range(CLIENTS)]
        await begun(session, len(answers) + CLIENTS)
        async with session.delete("/system/functions", json={"functionName": "echo"}) as answer:
            assert answer.status == 202, await answer.text()
        assert (await call(session))[0] == 404
        assert [status for status, _ in await asyncio.gather(*last)] == [200] * CLIENTS
        await until(world, lambda: not names(world))

    run(tmp_path, work, Bounds(drain_s=0.5))


@pytest.mark.slow
def test_to_zero_waits_for_a_request_that_came_in_the_same_moment(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(abrupt())
        await world.wait_ready("echo")
        assert (await call(session, 0))[0] == 200  # told just now: the next one is told a second later
        late = asyncio.create_task(call(session))
        await begun(session, 2)
        await world.scale("echo", 0)
        assert (await late)[0] == 200
        await until(world, lambda: not names(world))

    run(tmp_path, work, Bounds())


@pytest.mark.slow
def test_a_server_that_is_silent_while_it_computes_is_let_compute(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(abrupt(" one"))
        await world.wait_ready("echo")
        (name,) = names(world)
        assert await call(session, 7.0) == (200, name)
        assert await call(session, 0.0) == (200, name)

    run(tmp_path, work, Bounds(misses=1))  # two seconds without an answer would be enough

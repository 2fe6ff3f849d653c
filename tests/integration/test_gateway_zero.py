"""Functions at zero: woken by the gateway, or by their router's queue; every request waits, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from support.local_function import authorization, function

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

AT_ONCE = 200
Work = Callable[[LocalWorld, aiohttp.ClientSession], Awaitable[None]]


def run(tmp_path: Path, work: Work, *, controller: bool = False, **env: str) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(100),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=controller, env=env) as world,
            aiohttp.ClientSession(
                world.gateway_url,
                headers=authorization(*world.credentials),
                connector=aiohttp.TCPConnector(limit=0),
            ) as session,
        ):
            await work(world, session)

    asyncio.run(inside())


async def ask(session: aiohttp.ClientSession, path: str, **options: Any) -> tuple[int, str, str | None]:
    method = "POST" if "data" in options else "GET"
    async with session.request(method, path, **options) as answer:
        return answer.status, await answer.text(), answer.headers.get("retry-after")


async def until(world: LocalWorld, condition: Callable[[], bool]) -> None:
    """Waits for a change of the local world that makes a condition true."""
    while not condition():
        await world.supervisor.watch(world.supervisor.view().version, 5.0)


async def to_zero(world: LocalWorld, name: str = "echo") -> None:
    await world.scale(name, 0)
    await until(world, lambda: not world.replicas(name))


async def waiting(session: aiohttp.ClientSession, name: str, count: int) -> None:
    """Waits until so many requests are in hand for a function."""
    begun = f'gateway_function_invocation_started{{function_name="{name}.openfaas-fn"}} {count}.0'
    while begun not in (await ask(session, "/metrics"))[1]:
        await asyncio.sleep(0.02)


def labelled(deployment: Deployment, **labels: str) -> Deployment:
    scale = {f"com.openfaas.scale.{key.replace('_', '-')}": value for key, value in labels.items()}
    return msgspec.structs.replace(deployment, labels={**deployment.labels, **scale})


def test_two_hundred_at_once_wake_a_function_that_went_to_zero_and_start_one_replica(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(labelled(function(), zero="true", zero_duration="2s"))
        await world.wait_ready("echo")
        await until(world, lambda: not world.replicas("echo"))
        before = len(world.starts("echo"))
        asked = [
            ask(session, f"/function/echo/{number}", data=str(number).encode()) for number in range(AT_ONCE)
        ]
        answers = await asyncio.gather(*asked)
        assert Counter(status for status, _, _ in answers) == {200: AT_ONCE}
        told = [json.loads(text) for _, text, _ in answers]
        assert [(t["path"], t["body"]) for t in told] == [(f"/{n}", str(n)) for n in range(AT_ONCE)]
        assert len({t["replica"] for t in told}) == 1
        assert len(world.starts("echo")) == before + 1
        await until(world, lambda: not world.replicas("echo"))  # and it goes to zero again

    run(tmp_path, work, controller=True)


@pytest.mark.slow
def test_two_hundred_at_once_wake_stages_at_zero_through_their_router_and_start_only_what_is_used(
    tmp_path: Path,
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    pipeline = emulated("pipe", 2, execution="single-pass")
    write(bundle, pipeline)
    device = "emulated:alpha=0.001,beta=0.002"
    names = ["pipe-stage-0", "pipe-stage-1"]

    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        router, *stages = deployments_for(bundle, pipeline, device=device, slo={"deadline_s": 1.0})
        await world.deploy(router, *[labelled(s, zero="true", zero_duration="2s", max="2") for s in stages])
        await world.wait_ready("pipe")
        for name in names:
            await world.wait_ready(name)
        await until(world, lambda: not any(world.replicas(name) for name in names))
        before = {name: len(world.starts(name)) for name in names}
        most = dict.fromkeys(names, 0)

        async def look() -> None:
            while True:
                for name in names:
                    most[name] = max(most[name], len(world.replicas(name)))
                await world.supervisor.watch(world.supervisor.view().version, 5.0)

        looking = asyncio.create_task(look())
        asked = [ask(session, "/function/pipe/", data=f"item {number}".encode()) for number in range(AT_ONCE)]
        answers = await asyncio.gather(*asked)
        looking.cancel()
        assert [(status, text) for status, text, _ in answers] == [
            (200, f"item {number}") for number in range(AT_ONCE)
        ]
        for name in names:
            started = len(world.starts(name)) - before[name]
            assert 1 <= started == most[name] <= 2

    run(tmp_path, work, controller=True)


def test_wait_is_bounded_in_number_and_a_client_that_goes_away_frees_its_place(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await to_zero(world)
        going = [asyncio.create_task(ask(session, "/function/echo")) for _ in range(3)]
        await waiting(session, "echo", 3)
        status, text, retry_after = await ask(session, "/function/echo")
        assert (status, retry_after) == (429, "5")
        assert text == ("function echo has no ready replica and 3 requests wait for one, at most 3 may\n")
        going[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await going[0]
        left = 'gateway_function_invocation_total{code="499",function_name="echo.openfaas-fn"} 1.0'
        while left not in (await ask(session, "/metrics"))[1]:
            await asyncio.sleep(0.02)
        going[0] = asyncio.create_task(ask(session, "/function/echo"))
        await waiting(session, "echo", 5)
        await world.scale("echo", 1)
        assert [status for status, _, _ in await asyncio.gather(*going)] == [200] * 3

    run(tmp_path, work, KEYSTAGE_MAX_WAITING="3")


@pytest.mark.slow
def test_removed_while_waiting_is_unknown_and_a_new_deployment_answers(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await to_zero(world)
        removed = asyncio.create_task(ask(session, "/function/echo"))
        await waiting(session, "echo", 1)
        await world.remove("echo")
        assert await removed == (404, "function echo is not deployed\n", None)
        await world.deploy(function())
        await to_zero(world)
        replaced = asyncio.create_task(ask(session, "/function/echo"))
        await waiting(session, "echo", 2)
        await world.deploy(function("echo", NEW="1"))
        await world.scale("echo", 1)
        status, text, _ = await replaced
        assert status == 200
        assert json.loads(text)["replica"] == world.replicas("echo")[0].replica

    run(tmp_path, work)


def test_known_function_at_zero_is_503_with_retry_after_never_404(tmp_path: Path) -> None:
    async def work(world: LocalWorld, session: aiohttp.ClientSession) -> None:
        await world.deploy(function())
        await to_zero(world)
        answers = await asyncio.gather(*[ask(session, "/function/echo") for _ in range(AT_ONCE)])
        refusal = "function echo has no ready replica after 0.3 s, 0 wanted\n"
        assert Counter(answers) == {(503, refusal, "5"): AT_ONCE}
        assert world.function("echo").wake

    run(tmp_path, work, KEYSTAGE_WAKE_S="0.3")

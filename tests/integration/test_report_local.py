"""The report in the local world: a real controller tells the supervisor, and the gateway serves it."""

from __future__ import annotations

import asyncio
import http.client
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from support.local_function import authorization

from keystage.controller.audience import Unheard
from keystage.controller.platforms.local_report import SupervisorAudience
from keystage.controller.platforms.unix_http import UnixConnection, exchange
from keystage.gateway.backend import BackendUnavailable
from keystage.gateway.local import LocalBackend
from keystage.local.api import Deployment, Intent, Override
from keystage.local.events import Intended
from keystage.local.world import LocalWorld
from keystage.observability.api import REPORT_PATH, Report

FILES = Deployment(
    service="files",
    envProcess=f"{sys.executable} -m http.server --bind 127.0.0.1 --directory /dev/null $PORT",
)


def body(number: int, controller: str = "a") -> bytes:
    return msgspec.json.encode(Report(controller=controller, number=number, at_s=time.time()))


async def socket(
    world: LocalWorld, method: str, path: str, content: bytes | None = None
) -> tuple[int, bytes]:
    """One exchange with the supervisor."""
    connection = UnixConnection(str(world.home.control), 30.0)
    return await asyncio.to_thread(exchange, connection, method, path, content)


async def until(look: Callable[[], Awaitable[Report | None]], condition: Callable[[Report], bool]) -> Report:
    async with asyncio.timeout(60):
        while True:
            report = await look()
            if report is not None and condition(report):
                return report
            await asyncio.sleep(0.02)


def test_what_the_controller_decides_is_served_by_the_gateway(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            LocalWorld(tmp_path / "home", gateway_port=0, controller=True) as world,
            aiohttp.ClientSession(headers=authorization(*world.credentials)) as session,
        ):

            async def look() -> Report | None:
                async with session.get(f"{world.gateway_url}{REPORT_PATH}") as answer:
                    if answer.status == 503:
                        return None
                    assert answer.status == 200
                    return msgspec.json.decode(await answer.read(), type=Report)

            await world.deploy(FILES)
            await world.wait_ready("files", 1, 60)
            report = await until(look, lambda r: any(f.ready == 1 for f in r.functions))
            assert [function.function for function in report.functions] == ["files"]
            assert report.trouble == ""
            world.supervisor.handle(Intended("files", Intent(override=Override(2, time.time() + 600))))
            report = await until(look, lambda r: any(f.desired == 2 for f in r.functions))
            assert report.decisions[-1].text == "files: 1 -> 2, a person asked for 2"
            assert report.decisions[-1].kind == "override"
            (asked,) = report.functions
            assert asked.reason.startswith("override: 2, until ")
            assert asked.override_until_s is not None
            assert 500 < asked.override_until_s - report.at_s < 610
            report = await until(look, lambda r: any(f.ready == 2 for f in r.functions))
            before = report.controller
            assert world.controller is not None
            world.controller.kill()
            report = await until(look, lambda r: r.controller != before)  # the next one is heard as well
            assert [function.desired for function in report.functions] == [2]

    asyncio.run(work())


def test_the_supervisor_keeps_the_newest_and_refuses_what_is_none(tmp_path: Path) -> None:
    async def work() -> None:
        async with LocalWorld(tmp_path / "home", gateway_port=None, controller=False) as world:
            assert await socket(world, "GET", "/report") == (http.client.NO_CONTENT, b"")
            control = world.home.control
            audience = SupervisorAudience(control)
            second, first = body(2), body(1)
            await asyncio.to_thread(audience.tell, second)
            await asyncio.to_thread(audience.tell, first)  # late
            assert await socket(world, "GET", "/report") == (http.client.OK, second)
            assert (await socket(world, "GET", "/report?controller=a&since=2"))[0] == http.client.NO_CONTENT
            assert await socket(world, "GET", "/report?controller=a&since=1&wait=30") == (
                http.client.OK,
                second,
            )
            waiting = asyncio.create_task(socket(world, "GET", "/report?controller=a&since=2&wait=20"))
            third = body(3)
            await asyncio.to_thread(audience.tell, third)
            assert await waiting == (http.client.OK, third)
            name = quote("x y&z", safe="")
            assert await socket(world, "GET", f"/report?controller={name}&since=3") == (http.client.OK, third)
            for bad in (b"", b"{}", b"no"):
                status, text = await socket(world, "PUT", "/report", bad)
                assert (status, b"no report" in text) == (http.client.BAD_REQUEST, True)
            with pytest.raises(Unheard, match=r"answered 400: .*no report"):
                await asyncio.to_thread(audience.tell, b"{}")
            status, text = await socket(world, "GET", "/report?wait=x")
            assert (status, b"query parameter wait" in text) == (http.client.BAD_REQUEST, True)
            assert await socket(world, "GET", "/report") == (http.client.OK, third)
        with pytest.raises(Unheard, match=r"PUT /report"):
            SupervisorAudience(control).tell(third)

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_gateway_whose_supervisor_is_gone_shows_what_it_had_and_one_that_had_none_says_so(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        one = body(1)
        async with LocalWorld(tmp_path / "home", gateway_port=None, controller=False) as world:
            backend, other = LocalBackend(world.home.control), LocalBackend(world.home.control)
            await backend.start()
            await other.start()
            world.supervisor.reports.put(one)
            assert await backend.report(None, 0.0) == one
        assert await backend.report(None, 0.0) == one  # as old as it says
        with pytest.raises(BackendUnavailable, match="the supervisor cannot be reached"):
            await other.report(None, 0.0)
        await backend.stop()
        await other.stop()

    asyncio.run(asyncio.wait_for(work(), 120))

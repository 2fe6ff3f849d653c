"""One setting along the chain: the router gives up first, and its own answer reaches the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write(folder, emulated("pipe", 1, execution="single-pass"))
    return folder


@pytest.mark.slow
def test_router_s_own_deadline_answers_before_the_gateway_s_time_out(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYSTAGE_TIMEOUT_S", "1")  # the gateway waits half a second longer

    async def ask(session: aiohttp.ClientSession, **headers: str) -> tuple[int, str, str]:
        async with session.post("/function/pipe/", data=b"x", headers=headers) as answer:
            error = json.loads(await answer.text())["error"]
            return answer.status, error["code"], error["message"]

    async def inside() -> None:
        async with (
            asyncio.timeout(60),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False) as world,
            aiohttp.ClientSession(world.gateway_url) as session,
        ):
            pipeline = emulated("pipe", 1, execution="single-pass")
            await world.deploy(*deployments_for(bundle, pipeline, device="emulated:alpha=2,beta=0"))
            await world.wait_ready("pipe")
            await world.wait_ready("pipe-stage-0")
            status, code, said = await ask(session)
            assert (status, code, "deadline of 1 s" in said) == (504, "deadline_exceeded", True)
            status, code, said = await ask(session, **{"X-Keystage-Deadline-S": "0.3"})
            assert (status, code, "deadline of 0.3 s" in said) == (504, "deadline_exceeded", True)

    asyncio.run(inside())

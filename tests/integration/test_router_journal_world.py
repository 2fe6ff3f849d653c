"""`keystage up` hands its Redis to its routers, and to nobody else; two worlds share no key there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis
from support.servers import RedisServer

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

DEVICE = "emulated:alpha=0.0001,beta=0.0001"


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)


@pytest.mark.slow
def test_routers_of_two_worlds_share_a_redis_and_no_key(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    pipeline = emulated("tiny", 1, execution="looping")
    write(bundle, pipeline)
    body = {"prompt": "x", "max_tokens": 8, "temperature": 1}

    async def ask(url: str, key: str) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/function/tiny", json=body, headers={"Idempotency-Key": key}) as answer,
        ):
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = json.loads(await answer.read())
            return found

    async def world(name: str, redis: str) -> list[dict[str, Any]]:
        async with LocalWorld(
            tmp_path / name, controller=False, keysmanager=False, env={"KEYSTAGE_REDIS": redis}
        ) as made:
            await made.deploy(*deployments_for(bundle, pipeline, device=DEVICE))
            (router,) = await made.wait_ready("tiny")
            (stage,) = await made.wait_ready("tiny-stage-0")
            assert environment(router.pid)["KEYSTAGE_REDIS"] == redis
            assert "KEYSTAGE_REDIS" not in environment(stage.pid)
            assert redis not in (tmp_path / name / "functions.json").read_text()
            return [await ask(made.gateway_url, "k") for _ in range(2)]

    async def work() -> None:
        with RedisServer(tmp_path / "r") as server:
            first = await world("a", server.url)
            again = await world("a", server.url)  # `up` was ended and started anew
            other = await world("b", server.url)
            assert first[0] == first[1] == again[0]
            assert other[0]["seed"] != first[0]["seed"]
            async with Redis.from_url(server.url) as client:
                assert len(await client.keys("*request:*")) == 2

    asyncio.run(asyncio.wait_for(work(), 150))

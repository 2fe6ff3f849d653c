"""Consumers of the queue in Redis: none stays behind of gateways that came and went."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.redis_queues import call, gateway, names, taken, with_redis
from support.servers import RedisServer

from keystage.gateway.queue_redis import GROUP


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def consumers(client: Any, stream: str = "{keystage}:async:calls:f") -> set[str]:
    return {row["name"].decode() for row in await client.xinfo_consumers(stream, GROUP)}


def test_a_gateway_that_ends_leaves_its_consumer_only_with_what_it_holds(redis_server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with gateway(redis_server, "holder", 60.0, runs=False) as holder:
            await holder.put(call(1))
            await holder.put(call(2))
            (held,) = await holder.take({"f": 1})
            for number in range(5):
                # None is there for so long that what the holder has could be claimed.
                async with gateway(redis_server, f"start-{number}", 60.0) as queue:
                    (lease,) = await queue.take({"f": 1})
                    assert f"start-{number}" in await consumers(client)
                    await queue.again(lease, call(2), 0.0)
        assert await consumers(client) == {"holder"}
        async with gateway(redis_server, "next") as queue:  # what the holder held is there to be claimed
            assert names(await taken(queue)) == ["c2"]
            assert names(await taken(queue)) == [held.call.id if held.call is not None else ""]

    with_redis(redis_server, work)


def test_consumers_of_gateways_that_are_silent_for_long_are_removed_by_others(
    redis_server: RedisServer,
) -> None:
    async def work(client: Any) -> None:
        async with (
            gateway(redis_server, "killed", 60.0, runs=False) as killed,
            gateway(redis_server, "holder", 60.0, runs=False) as holder,
        ):
            for queue, number in ((holder, 1), (killed, 2)):
                await queue.put(call(number))
                (lease,) = await queue.take({"f": 1})
                if queue is killed:
                    await queue.again(lease, call(number), 0.0)
            assert await consumers(client) == {"holder", "killed"}
            async with gateway(redis_server, "living", 0.05) as living:
                while await consumers(client) != {"holder"}:
                    await asyncio.sleep(0.02)
                assert names(await taken(living)) != []  # a consumer that was removed is made anew

    with_redis(redis_server, work)

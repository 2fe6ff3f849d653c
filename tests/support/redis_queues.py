"""Queues of several gateways over one Redis, and small calls for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from support.servers import RedisServer

from keystage.gateway.queue import Bounds, Call, CallQueue, Lease
from keystage.gateway.queue_redis import RedisQueue

BOUNDS = Bounds(entries=5, size_bytes=4000)
LEASE_S = 0.6


def call(number: int, function: str = "f", body: bytes = b"") -> Call:
    """A call that is told apart by its number."""
    return Call(key=f"k{number}", id=f"c{number}", function=function, path="/", headers=[], body=body)


def names(leases: list[Lease]) -> list[str]:
    """Ids of the calls, or what is wrong with them."""
    return [lease.call.id if lease.call is not None else lease.trouble for lease in leases]


@asynccontextmanager
async def gateway(
    server: RedisServer, name: str | None, lease_s: float = LEASE_S, *, runs: bool = True
) -> AsyncIterator[RedisQueue]:
    """The queue of a gateway that runs; or that never began to, and so renews nothing."""
    queue = RedisQueue(server.url, BOUNDS, lease_s, name)
    try:
        if runs:
            await queue.start(lambda: None)
        yield queue
    finally:
        await queue.stop()


def with_redis(server: RedisServer, work: Callable[[Any], Awaitable[None]]) -> None:
    """Runs a test over an empty Redis, with a client of it."""

    async def inside() -> None:
        async with asyncio.timeout(30), Redis.from_url(server.url) as client:
            await client.flushall()
            await work(client)

    asyncio.run(inside())


async def taken(queue: CallQueue, within_s: float = 5.0) -> list[Lease]:
    """Waits, bounded, until there are calls of `f` to take."""
    async with asyncio.timeout(within_s):
        while not (leases := await queue.take({"f": 5})):
            await asyncio.sleep(0.05)
    return leases

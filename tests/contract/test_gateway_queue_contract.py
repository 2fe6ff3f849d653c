"""What every queue of asynchronous calls must do, run over each of them; then what only Redis can do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from support.redis_queues import BOUNDS, LEASE_S, call, gateway, names, taken, with_redis
from support.servers import RedisServer
from typer.testing import CliRunner

from keystage.cli.main import app
from keystage.gateway.queue import CallQueue, QueueFull, QueueUnavailable
from keystage.gateway.queue_memory import MemoryQueue
from keystage.gateway.queue_redis import GROUP, RedisQueue


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@asynccontextmanager
async def _memory(_: pytest.FixtureRequest) -> AsyncIterator[CallQueue]:
    yield MemoryQueue(BOUNDS)


@asynccontextmanager
async def _redis(request: pytest.FixtureRequest) -> AsyncIterator[CallQueue]:
    server: RedisServer = request.getfixturevalue("redis_server")
    async with Redis.from_url(server.url) as client:
        await client.flushall()
    yield RedisQueue(server.url, BOUNDS, LEASE_S)


HARNESSES = {"memory": _memory, "redis": _redis}


@pytest.fixture(params=sorted(HARNESSES))
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    def go(work: Callable[[CallQueue, asyncio.Event], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with asyncio.timeout(30), HARNESSES[request.param](request) as queue:
                bell = asyncio.Event()
                await queue.start(bell.set)
                try:
                    await work(queue, bell)
                finally:
                    await queue.stop()

        asyncio.run(inside())

    return go


def test_calls_come_once_in_order_and_as_many_as_there_is_room(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, _: asyncio.Event) -> None:
        for number in range(4):
            await queue.put(call(number))
        await queue.put(call(9, "g", b"\x00\xff"))
        assert list(await queue.functions()) == ["f", "g"]
        first = await queue.take({"f": 3})
        assert names(first) == ["c0", "c1", "c2"]
        assert await queue.take({}) == []
        rest = await queue.take({"f": 3, "g": 1, "none": 2})
        assert names(rest) == ["c3", "c9"]
        assert rest[1].call == call(9, "g", b"\x00\xff")
        assert await queue.take({"f": 3, "g": 3}) == []
        assert {f: d.calls for f, d in (await queue.depth()).items()} == {"f": 4, "g": 1}
        for lease in [*first, *rest]:
            await queue.done(lease)
        await queue.done(first[0])  # a second time: nothing
        assert list(await queue.functions()) == []
        assert await queue.depth() == {}

    run(work)


def test_a_new_call_rings(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, bell: asyncio.Event) -> None:
        if isinstance(queue, RedisQueue):
            await bell.wait()  # it rings once when it begins to listen
            bell.clear()
        await queue.put(call(1))
        await asyncio.wait_for(bell.wait(), 5)

    run(work)


def test_a_call_comes_again_when_its_time_has_come(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, _: asyncio.Event) -> None:
        await queue.put(call(1))
        await queue.put(call(2))
        one, two = await queue.take({"f": 2})
        assert queue.next_due_s() == math.inf
        later = msgspec.structs.replace(call(1), attempts=3)
        await queue.again(one, later, 2.0)
        await queue.done(two)
        assert await queue.take({"f": 2}) == []
        assert (await queue.depth())["f"].calls == 1
        assert 0 < queue.next_due_s() <= 2.0
        await queue.put(call(3))  # is not held up by the one that waits
        (three,) = await queue.take({"f": 2})
        assert names([three]) == ["c3"]
        await asyncio.sleep(queue.next_due_s() + 0.01)
        (again,) = await queue.take({"f": 2})
        assert again.call == later
        await queue.again(again, later, 0.0)
        (again,) = await queue.take({"f": 2})
        await queue.done(again)
        await queue.done(three)
        assert list(await queue.functions()) == []

    run(work)


def test_bounds_refuse_and_what_is_settled_makes_room(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, _: asyncio.Event) -> None:
        for number in range(5):
            await queue.put(call(number))
        with pytest.raises(QueueFull, match=r"function f .*5 calls .*KEYSTAGE_ASYNC_ENTRIES"):
            await queue.put(call(5))
        leases = await queue.take({"f": 2})
        with pytest.raises(QueueFull):
            await queue.put(call(5))  # running calls count
        await queue.done(leases[0])
        await queue.again(leases[1], call(1), 60.0)
        await queue.put(call(5))
        with pytest.raises(QueueFull):
            await queue.put(call(6))  # calls that wait for their next attempt count
        await queue.put(call(7, "g", b"x" * 1500))
        with pytest.raises(QueueFull, match=r"4000 bytes .*KEYSTAGE_ASYNC_BYTES"):
            await queue.put(call(8, "g", b"x" * 1500))
        (big,) = await queue.take({"g": 1})
        await queue.bury(big, "too big")
        await queue.put(call(8, "g", b"x" * 1500))

    run(work)


def test_a_buried_call_is_gone_from_the_queue(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, _: asyncio.Event) -> None:
        await queue.put(call(1))
        (lease,) = await queue.take({"f": 1})
        await queue.bury(lease, "why")
        await queue.bury(lease, "why")
        assert await queue.take({"f": 1}) == []
        assert list(await queue.functions()) == []

    run(work)


def test_the_oldest_call_has_an_age(run: Callable[..., None]) -> None:
    async def work(queue: CallQueue, _: asyncio.Event) -> None:
        await queue.put(call(1))
        await asyncio.sleep(0.1)
        await queue.put(call(2))
        assert 0.05 < (await queue.depth())["f"].oldest_s < 20
        leases = await queue.take({"f": 2})
        for lease in leases:
            assert lease.call is not None
            await queue.again(lease, lease.call, 60)
        assert (await queue.depth())["f"].oldest_s == 0

    run(work)


# ------------------------------------------------------------ Redis alone


def test_a_living_gateway_keeps_its_calls_and_a_dead_one_s_are_claimed(redis_server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with gateway(redis_server, "b") as living, gateway(redis_server, "a", runs=False) as dead:
            await dead.put(call(1))
            await dead.put(call(2))
            (one,) = await dead.take({"f": 1})
            (two,) = await living.take({"f": 1})
            assert names([one, two]) == ["c1", "c2"]
            (claimed,) = await taken(living)
            assert (names([claimed]), claimed.losses) == (["c1"], 1)
            async with gateway(redis_server, "c") as third:
                await asyncio.sleep(3 * LEASE_S)
                assert await third.take({"f": 5}) == []  # both are renewed by the living one
            # The dead one was only slow: it settles first, and the other's settling does nothing.
            await dead.again(one, call(1), 0.0)
            await living.again(claimed, call(1), 0.0)
            await living.done(two)
            assert names(await taken(living)) == ["c1"]
            assert await living.take({"f": 5}) == []

    with_redis(redis_server, work)


def test_an_entry_that_is_no_call_is_told_and_buried_as_it_is(redis_server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with gateway(redis_server, "a") as queue:
            await queue.put(call(1))
            stream = "{keystage}:async:calls:f"
            await client.xadd(stream, {"call": b"\xff\xff"})
            await client.xadd(stream, {"other": "x"})
            await client.xadd(stream, {f"f{n}": "x" for n in range(9000)})
            await queue.put(call(2))
            leases = await queue.take({"f": 9})
            assert [lease.call is None for lease in leases] == [False, True, True, True, False]
            assert "are no call" in leases[1].trouble
            assert "no field `call`" in leases[2].trouble
            for lease in leases:
                await (queue.bury(lease, lease.trouble) if lease.call is None else queue.done(lease))
            dead = await client.xrange("{keystage}:async:dead")
            assert [fields[b"function"] for _, fields in dead] == [b"f"] * 3
            assert (dead[0][1][b"call"], dead[1][1][b"other"]) == (b"\xff\xff", b"x")
            assert await client.keys() == [b"{keystage}:async:dead"]

    with_redis(redis_server, work)


def test_dead_letters_are_listed_with_their_reason_and_put_back(redis_server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with gateway(redis_server, "a") as queue:
            for number in (1, 2):
                await queue.put(call(number, "f" if number == 1 else "g"))
            await client.xadd("{keystage}:async:calls:f", {"other": "x"})
            for lease in await queue.take({"f": 2, "g": 1}):
                failed = msgspec.structs.replace(lease.call, attempts=4) if lease.call is not None else None
                if failed is not None:
                    await queue.again(lease, failed, 0.0)
                else:
                    await queue.bury(lease, "no call")
            for lease in await queue.take({"f": 1, "g": 1}):
                await queue.bury(lease, "5 attempts failed")

        def command(*arguments: str) -> tuple[int, list[str]]:
            done = CliRunner().invoke(app, ["async", "dead-letters", "--redis", redis_server.url, *arguments])
            return done.exit_code, [
                line.split("  ", 1)[1] for line in done.output.splitlines() if "  " in line
            ]

        code, lines = await asyncio.to_thread(command)
        assert (code, lines) == (0, ["f  ?  no call", "f  c1  5 attempts failed", "g  c2  5 attempts failed"])
        code, lines = await asyncio.to_thread(command, "--replay", "--function", "f")
        assert lines == [
            "f  ?  no call  (stays: it cannot be decoded)",
            "f  c1  5 attempts failed  (back in the queue)",
        ]
        assert (await asyncio.to_thread(command))[1] == ["f  ?  no call", "g  c2  5 attempts failed"]
        async with gateway(redis_server, "b") as queue:
            (lease,) = await queue.take({"f": 5})
            assert lease.call == call(1)
            await queue.done(lease)
            assert list(await queue.functions()) == []

    with_redis(redis_server, work)


def test_a_stream_without_its_group_is_read_from_its_start(redis_server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with gateway(redis_server, "a") as queue:
            await queue.put(call(1))
            await client.xgroup_destroy("{keystage}:async:calls:f", GROUP)
            assert names(await taken(queue)) == ["c1"]

    with_redis(redis_server, work)


def test_a_redis_that_is_away_or_refuses_is_named_in_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(kind: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if kind in r.getMessage()]

    said = "^the asynchronous queue in Redis did not acknowledge this: ask again later \\(Retry-After\\)$"

    async def work() -> None:
        async with Redis.from_url(server.url) as admin, gateway(server, None) as queue:
            await goes(admin, queue)

    async def goes(admin: Any, queue: RedisQueue) -> None:
        for operation in (queue.put(call(1)), queue.functions(), queue.take({"f": 1}), queue.depth()):
            with pytest.raises(QueueUnavailable, match=said) as away:
                await operation
            assert away.value.status == 503
        assert len(told(f"Redis at {server.address} does not answer: ")) == 1
        await asyncio.to_thread(server.start)
        await queue.put(call(1))
        await admin.config_set("maxmemory", 1)
        with pytest.raises(QueueUnavailable, match=said):
            await queue.put(call(2))
        (lease,) = await queue.take({"f": 1})  # what it has can be run, and nothing is half done
        with pytest.raises(QueueUnavailable, match=said):
            await queue.again(lease, call(1), 0.0)
        with pytest.raises(QueueUnavailable, match=said):
            await queue.bury(lease, "why")
        (line,) = told("refuses what the asynchronous queue asks: ")
        assert "maxmemory" in line
        await admin.config_set("maxmemory", 0)
        await queue.again(lease, call(1), 0.0)
        (lease,) = await queue.take({"f": 1})
        await queue.put(call(2))
        await admin.config_set("maxmemory", 1)
        await queue.done(lease)
        await admin.config_set("maxmemory", 0)
        await asyncio.to_thread(server.kill)
        with pytest.raises(QueueUnavailable):
            await queue.take({"f": 1})
        await asyncio.to_thread(server.start)
        assert names(await taken(queue)) == ["c2"]

    server = RedisServer(tmp_path / "redis", "--requirepass", "s3cret", tcp=True)
    server.url = server.url.replace("redis://", "redis://:s3cret@")
    try:
        asyncio.run(work())
        assert "s3cret" not in caplog.text
    finally:
        server.kill()

"""Asynchronous calls whose queue is a real Redis: it dies, the gateway dies, and no accepted call is lost.

Redis runs with appendfsync always. A call may run more than once only where an acknowledgment was lost: of
its acceptance (the caller got 503 or a broken connection and sent it again), or of its end (it ran when the
gateway was killed).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.async_world import AsyncWorld, run_async_world
from support.redis_queues import gateway
from support.servers import RedisServer

from keystage.gateway.queue import Call
from keystage.gateway.queue_redis import RedisQueue

IDS = [f"c{number}" for number in range(1000)]
SLOTS = 16
PATH = "job/slow?s=0.02"
PAUSE_S = 0.1
"""So that calls are accepted for as long as others run."""


def run(
    tmp_path: Path, work: Callable[[AsyncWorld, RedisServer], Awaitable[None]], *, started: bool = True
) -> None:
    server = RedisServer(tmp_path / "redis", tcp=not started)
    env = {
        "KEYSTAGE_REDIS": server.url,
        "KEYSTAGE_ASYNC_LEASE_S": "2",
        "KEYSTAGE_ASYNC_PER_FUNCTION": str(SLOTS),
        "KEYSTAGE_ASYNC_DRAIN_S": "0.2",
    }
    try:
        if started:
            server.start()
        run_async_world(tmp_path, lambda world: work(world, server), **env)
    finally:
        server.kill()


async def until_empty(world: AsyncWorld, server: RedisServer) -> None:
    """Waits until every call is settled: Redis holds nothing, dead letters included."""

    async def look(client: Any) -> None:
        while await client.keys():
            await asyncio.sleep(0.05)

    async with Redis.from_url(server.url) as client:
        looking = asyncio.create_task(look(client))
        try:
            await world.until(looking.done, "an empty queue")
            await looking
        finally:
            looking.cancel()
            await asyncio.wait([looking])


@pytest.mark.slow
def test_redis_killed_in_the_midst_of_a_thousand_calls_loses_none(tmp_path: Path) -> None:
    async def work(w: AsyncWorld, server: RedisServer) -> None:
        await w.deploy("job")
        flood = asyncio.create_task(w.flood(IDS, PATH, PAUSE_S))
        for share in (150, 400):
            await w.until(lambda share=share: len(w.ran()) >= share, f"{share} calls")
            await asyncio.to_thread(server.kill)
            async with w.session.post("/function/job", data=b"sync") as answer:
                assert answer.status == 200  # what needs no queue goes on
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
        refused = await flood
        await w.until(lambda: w.ran().keys() >= set(IDS), "all calls")
        await until_empty(w, server)
        ran = w.ran()
        assert sum(refused.values()) > 0  # callers did notice
        assert not {call_id: ran[call_id] for call_id in IDS if ran[call_id] > 1 + refused[call_id]}

    run(tmp_path, work)


@pytest.mark.slow
def test_a_gateway_killed_in_the_midst_of_a_thousand_calls_loses_none(tmp_path: Path) -> None:
    async def work(w: AsyncWorld, server: RedisServer) -> None:
        await w.deploy("job")
        flood = asyncio.create_task(w.flood(IDS, PATH, PAUSE_S))
        await w.until(lambda: len(w.ran()) >= 300, "300 calls")
        assert w.world.gateway is not None
        w.world.gateway.kill()
        refused = await flood
        await w.until(lambda: w.ran().keys() == set(IDS), "all calls")
        await until_empty(w, server)
        ran = w.ran()
        assert w.world.gateway.restarts == 1
        assert sum(ran.values()) - len(IDS) <= SLOTS + sum(refused.values())

    run(tmp_path, work)


@pytest.mark.slow
def test_a_gateway_that_is_stopped_hands_over_what_it_runs(tmp_path: Path) -> None:
    async def work(w: AsyncWorld, server: RedisServer) -> None:
        await w.deploy("job")
        await w.post("job/slow?s=1.5", b"", X_Call_Id="long", X_Callback_Url=w.receiver_url)
        await w.until(lambda: "long" in w.ran(), "the call begins")
        assert w.world.gateway is not None
        assert w.world.gateway.process is not None
        w.world.gateway.process.terminate()
        await w.until(lambda: w.ran()["long"] == 2, "the next gateway runs it")
        await w.until(lambda: w.callbacks, "callback")
        await until_empty(w, server)
        assert [c[1]["x-function-status"] for c in w.callbacks] == ["200"]

    run(tmp_path, work)


@pytest.mark.slow
def test_without_redis_calls_are_refused_by_name_and_the_rest_goes_on(tmp_path: Path) -> None:
    async def work(w: AsyncWorld, server: RedisServer) -> None:
        await w.deploy("job")
        status, text, headers = await w.post("job")
        assert (status, headers["retry-after"]) == (503, "5")
        assert text.startswith("the asynchronous queue in Redis did not acknowledge this")
        assert not [secret for secret in ("127.0.0.1", server.place, "Errno", "refused") if secret in text]
        for _ in range(5):
            assert (await w.post("job"))[:2] == (503, text)
        log = (w.world.home.logs / "_gateway.log").read_text()
        assert log.count(f"Redis at {server.address} does not answer: ") == 1
        assert (await w.post("none"))[0] == 404
        async with w.session.post("/function/job", data=b"sync") as answer:
            assert (answer.status, (await answer.read())[:4]) == (200, b"sync")
        await asyncio.to_thread(server.start)
        assert (await w.post("job", b"", X_Call_Id="now"))[0] == 202
        await w.until(lambda: w.ran()["now"], "the call")
        await until_empty(w, server)
        # What can never be run becomes a dead letter and blocks nothing.
        async with Redis.from_url(server.url) as client, gateway(server, None, 2.0, runs=False) as other:
            await bury(w, client, other)

    async def bury(w: AsyncWorld, client: Any, other: RedisQueue) -> None:
        broken = Call(key="k", id="broken", function="job", path="/", headers=[("x", "a\nb")], body=b"")
        await other.put(broken)
        await client.xadd("{keystage}:async:calls:job", {"call": b"\xff"})
        await w.post("job", b"", X_Call_Id="good")
        await w.until(lambda: w.ran()["good"], "the good call")
        while await other.functions():
            await asyncio.sleep(0.02)
        reasons = [letter.reason for letter in await other.dead_letters()]
        assert len(reasons) == 2
        assert any(reason.startswith("it cannot be run: Unsendable") for reason in reasons)
        assert any("1 bytes are no call" in reason for reason in reasons)

    run(tmp_path, work, started=False)


def test_an_address_that_is_none_ends_the_gateway_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keystage.gateway.app import main

    monkeypatch.setenv("KEYSTAGE_CONTROL", str(tmp_path / "control"))
    monkeypatch.setenv("KEYSTAGE_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("KEYSTAGE_REDIS", "redis://:s3cret@host:port")
    assert main() == 2
    said = capsys.readouterr().err
    assert "KEYSTAGE_REDIS=...: " in said
    assert "expected redis://" in said
    assert "s3cret" not in said

"""The journal of keyed requests over a real Redis, at its edges: bursts, ends of a grace, unknown streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.journals import expected, over, router, until
from support.servers import RedisServer

from keystage.router.idempotency import Standing
from keystage.router.openai_errors import AnswerLost, JournalAway


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_burst_of_new_requests_is_no_loss_of_redis(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server, wait_s=0.25) as one:
            one.engine.let(99)
            asked = [one.tokens(f"k{n}", seed=n, most=3) for n in range(800)]
            assert await asyncio.gather(*asked) == [expected(n, 3) for n in range(800)]
            assert one.journal.stats.losses == 0

    over(server, work)


def test_who_comes_back_at_the_end_of_the_grace_gets_the_whole_answer(server: RedisServer) -> None:
    """Whoever joins while the request is being stopped is a reader like any other."""

    async def work(_: Any) -> None:
        async with router(server) as one:
            one.engine.let(5)
            async with one.joined("k", seed=3) as record:
                assert len(await one.read(record, 0, 5)) == 5
            one.keyed._end_grace(record, record.idle_s)
            one.engine.let(99)
            assert await one.tokens("k") == expected(3)
            assert one.keyed.counts["running"] == 1
            one.engine.let(0)
            async with one.joined("m", seed=4) as record:
                await until(lambda: one.engine.open == 1, "it runs")
            one.keyed._end_grace(record, record.idle_s)
            await until(lambda: record.standing is Standing.PAUSED, "stopped")
            one.engine.let(99)
            assert await one.tokens("m") == expected(4)

    over(server, work)


def test_a_stream_that_nobody_knows_is_lost_or_waits_for_the_journal(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "r") as server:

        async def work(_: Any) -> None:
            async with router(server, wait_s=0.5) as one:
                with pytest.raises(AnswerLost):
                    await one.tokens("k", position=5)
                server.kill()
                await until(lambda: one.journal.is_away, "Redis is away")
                with pytest.raises(JournalAway):
                    await one.tokens("m", position=5)

        over(server, work)

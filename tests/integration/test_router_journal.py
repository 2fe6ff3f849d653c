"""The journal of keyed requests over a real Redis: given again, gone on with, fenced; Redis lost."""

from __future__ import annotations

import asyncio
import logging
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.journals import Router, expected, journaled, over, router, until
from support.servers import RedisServer

from keystage.router.engine import Failure, TooLate
from keystage.router.idempotency import Record, Stamp, Whole, name_of
from keystage.router.idempotency_runs import Emit
from keystage.router.openai_errors import KeyReused


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_an_answer_is_given_again_by_another_router(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server) as first, router(server) as second:
            first.engine.let(99)
            assert await first.tokens("k", seed=5) == expected(5)
            assert await second.tokens("k", seed=6) == expected(5)
            assert (first.engine.begun, second.engine.begun) == (1, 0)
            async with second.joined("k") as record:
                assert record.stamp == Stamp(5, "", 7)

    over(server, work)


def test_bytes_and_failures_are_given_again_too(server: RedisServer) -> None:
    made: list[str] = []

    def whole(body: bytes) -> Any:
        async def work(_record: Record, _emit: Emit) -> Whole:
            made.append("whole")
            return Whole(body, b"image/x")

        return work

    async def fails(_record: Record, _emit: Emit) -> None:
        made.append("fails")
        refusal = Failure("it ended two workers")
        refusal.code = "poisoned"
        raise refusal

    async def ask(asked: Router, key: str, work: Any) -> Whole:
        async with asked.keyed.joined(name_of("", key), "f", Stamp(0, "", 1), work, None) as record:
            return await asked.keyed.whole(record)

    async def work(client: Any) -> None:
        async with router(server) as first, router(server) as second:
            assert await ask(first, "a", whole(b"\x00\xff" * 9)) == Whole(b"\x00\xff" * 9, b"image/x")
            assert await ask(second, "a", whole(b"other")) == Whole(b"\x00\xff" * 9, b"image/x")
            for asked in (first, second):
                with pytest.raises(Failure, match="ended two workers") as found:
                    await ask(asked, "b", fails)
                assert found.value.code == "poisoned"
            assert made == ["whole", "fails"]
            # An answer too large for everybody's round trip is kept in memory alone, and made anew elsewhere.
            large = b"x" * (5 << 20)
            assert (await ask(first, "c", whole(large))).body == large
            assert (await ask(first, "c", whole(b"other"))).body == large
            assert (await ask(second, "c", whole(b"other"))).body == b"other"

    over(server, work)


def test_redis_has_every_token_before_a_reader_has(server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with router(server) as one, one.joined("k") as record:
            for count in (1, 2, 5, 13):
                one.engine.let(count)
                tokens = await one.read(record, 0, count)
                assert len(tokens) == count
                assert await journaled(client, "k") >= count

    over(server, work)


def test_tokens_of_a_wave_go_in_one_round_trip(server: RedisServer) -> None:
    sessions, waves = 40, 25

    async def work(_: Any) -> None:
        async with router(server) as one:
            readers = [asyncio.create_task(one.tokens(f"k{n}", seed=n, most=waves)) for n in range(sessions)]
            await until(lambda: one.engine.open == sessions, "all run")
            records = list(one.keyed.table.running)
            before = one.journal.stats.round_trips
            for wave in range(1, waves):
                one.engine.let(wave)
                await until(lambda wave=wave: all(r.released == wave for r in records), "a wave")
            assert one.journal.stats.round_trips - before <= 2 * (waves - 1)
            one.engine.let(waves)
            assert await asyncio.gather(*readers) == [expected(n, waves) for n in range(sessions)]

    over(server, work)


def test_what_a_dead_router_had_begun_goes_on_where_it_was(server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with router(server, lease_s=0.6) as first, router(server) as second:
            first.engine.let(7)
            async with first.joined("k", seed=3) as record:
                assert await first.read(record, 0, 7) == expected(3)[:7]
                first.crash()
                second.engine.let(99)
                begun_s = time.monotonic()
                # Its own draw of the seed does not count: the request has one.
                assert await second.tokens("k", seed=4) == expected(3)
                assert time.monotonic() - begun_s > 0.2  # a sign of life had to lapse
            assert (second.engine.made, second.journal.stats.taken_over) == (13, 1)

    over(server, work)


def test_who_asks_while_the_owner_lives_looks_on(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server) as first, router(server) as second:
            first.engine.let(1)
            async with first.joined("k", seed=3) as mine:
                await first.read(mine, 0, 1)
                async with second.joined("k", seed=4) as theirs:
                    for count in (1, 4, 9):
                        first.engine.let(count)
                        assert await first.read(mine, 0, count) == expected(3)[:count]
                        assert await second.read(theirs, 0, count) == expected(3)[:count]
                    first.engine.let(99)
                    assert await second.read(theirs) == expected(3)
            assert (second.engine.begun, second.journal.stats.taken_over) == (0, 0)

    over(server, work)


def test_a_router_that_stalled_is_fenced_and_its_readers_go_on(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server, lease_s=0.6) as first, router(server) as second:
            first.engine.let(5)
            async with first.joined("k", seed=3) as record:
                assert len(await first.read(record, 0, 5)) == 5
                first.stall()
                second.engine.let(12)
                async with second.joined("k") as theirs:
                    assert await second.read(theirs, 0, 12) == expected(3)[:12]
                    first.engine.let(6)  # it wakes up, and makes what is made already
                    await until(lambda: first.keyed.fenced == 1, "fenced")
                    await until(lambda: first.engine.open == 0, "its session ended")
                    second.engine.let(99)
                    assert await first.read(record) == expected(3)
            assert (first.engine.begun, second.engine.begun) == (1, 1)

    over(server, work)


def test_a_router_that_leaves_hands_its_requests_over_at_once(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server) as second:
            async with router(server) as first:
                first.engine.let(5)
                async with first.joined("k", seed=3) as record:
                    assert len(await first.read(record, 0, 5)) == 5
            second.engine.let(99)
            assert await second.tokens("k") == expected(3)
            assert second.engine.made == 15

    over(server, work)


def test_a_key_of_another_request_is_refused_by_every_router(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server) as first, router(server) as second:
            first.engine.let(99)
            second.engine.let(99)
            await first.tokens("k")
            with pytest.raises(KeyReused):
                await second.tokens("k", digest="other")
            assert await second.tokens("k") == expected(1)

    over(server, work)


def test_what_is_served_elsewhere_shares_no_key(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server, scope="a:x:0") as first, router(server, scope="a:y:0") as second:
            first.engine.let(99)
            second.engine.let(99)
            assert await first.tokens("k", seed=1) == expected(1)
            assert await second.tokens("k", seed=2, digest="other") == expected(2)

    over(server, work)


def test_nothing_stays_for_ever(server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with router(server, kept_s=30.0, longest_s=40.0) as one:
            one.engine.let(5)
            async with one.joined("k") as record:
                await one.read(record, 0, 5)
                names = await client.keys("*")
                assert len(names) == 3  # its hash, its tokens, the router's sign of life
                for name in names:
                    assert 0 < await client.pttl(name) <= 70_000
                one.engine.let(99)
                await one.read(record)
            for name in await client.keys("*"):
                assert 0 < await client.pttl(name) <= 30_000
        assert not await client.keys("*router:*")

    over(server, work)


def test_a_refusal_that_may_pass_leaves_the_request_where_it_is(server: RedisServer) -> None:
    async def work(_: Any) -> None:
        async with router(server) as first, router(server) as second:
            first.engine._refuse = lambda position: TooLate("late") if position == 6 else None
            first.engine.let(99)
            second.engine.let(99)
            with pytest.raises(TooLate):
                await first.tokens("k", seed=3)
            assert await second.tokens("k", seed=4) == expected(3)
            assert second.engine.made == 14
            first.engine._refuse = lambda _position: None
            assert await first.tokens("k", seed=5) == expected(3)

    over(server, work)


def test_without_redis_serving_goes_on_and_with_it_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "r") as server:

        async def work(client: Any) -> None:
            async with router(server, wait_s=0.5) as one:
                one.engine.let(4)
                async with one.joined("k", seed=3) as record:
                    assert len(await one.read(record, 0, 4)) == 4
                    server.kill()
                    one.engine.let(9)
                    assert await one.read(record, 0, 9) == expected(3)[:9]
                    assert one.journal.is_away
                    one.engine.let(12)
                    assert await one.tokens("new", seed=8, most=12) == expected(8, 12)
                    server.start()
                    await until(lambda: not one.journal.is_away, "Redis is back")
                    one.engine.let(20)
                    assert await one.read(record) == expected(3)
                    assert await journaled(client, "k") == 20
            async with router(server) as other:
                assert await other.tokens("k") == expected(3)
                assert other.engine.begun == 0

        with caplog.at_level(logging.INFO):
            over(server, work)
    told = [record.message for record in caplog.records if "Redis at" in record.message]
    assert len(told) == 2, told
    assert "kept in memory alone" in told[0]
    assert "answers again" in told[1]


def test_an_end_that_redis_did_not_hear_of_is_told_when_it_is_back(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "r") as server:

        async def work(client: Any) -> None:
            async with router(server, wait_s=0.5) as one, router(server) as other:
                one.engine.let(4)
                async with one.joined("k", seed=3) as record:
                    assert len(await one.read(record, 0, 4)) == 4
                    server.kill()
                    one.engine.let(20)
                    assert await one.read(record) == expected(3)
                server.start()
                await until(lambda: not one.journal.is_away and not other.journal.is_away, "back")
                assert await other.tokens("k") == expected(3)
                assert other.engine.begun == 0

        over(server, work)


def test_a_redis_that_hangs_costs_one_bounded_wait(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "r") as server:

        async def work(_: Any) -> None:
            async with router(server, wait_s=0.25) as one:
                one.engine.let(2)
                async with one.joined("k", seed=3) as record:
                    assert len(await one.read(record, 0, 2)) == 2
                    server.signal(signal.SIGSTOP)
                    for count in range(3, 20):
                        one.engine.let(count)
                        assert len(await one.read(record, 0, count)) == count
                    one.engine.let(20)
                    assert await one.read(record) == expected(3)
                    assert one.journal.stats.losses == 1
                server.signal(signal.SIGCONT)
                await until(lambda: not one.journal.is_away, "Redis is back")

        over(server, work)


def test_passwords_reach_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        made = Router("redis://user:sesame@127.0.0.1:1/0")
        made.keyed.start()
        made.engine.let(99)
        assert await made.tokens("k") == expected(1)
        await made.keyed.stop()
        assert "sesame" not in repr(made.journal._settings)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(asyncio.wait_for(work(), 30))
    assert "redis://127.0.0.1:1" in caplog.text
    assert "sesame" not in caplog.text


def test_tokens_are_stored_four_bytes_each(server: RedisServer) -> None:
    async def work(client: Any) -> None:
        async with router(server) as one:
            one.engine.let(99)
            await one.tokens("k", most=3)
            (name,) = await client.keys("*tokens:*")
            packed = b"".join(fields[b"t"] for _, fields in await client.xrange(name))
            assert list(struct.unpack("=3I", packed)) == expected(1, 3)

    over(server, work)


def test_what_redis_did_not_hear_of_a_stopped_request_is_written_when_it_goes_on(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "r") as server:

        async def work(client: Any) -> None:
            async with router(server, wait_s=0.5) as one, router(server, wait_s=0.5) as other:
                one.engine.let(4)
                async with one.joined("k", seed=3) as record:
                    assert len(await one.read(record, 0, 4)) == 4
                    server.kill()
                    one.engine.let(9)
                    assert len(await one.read(record, 0, 9)) == 9
                    one.engine._refuse = lambda _position: TooLate("late")
                    one.engine.let(10)
                    with pytest.raises(TooLate):
                        await one.read(record)
                server.start()
                await until(lambda: not one.journal.is_away and not other.journal.is_away, "back")
                one.engine._refuse = lambda position: TooLate("late") if position == 15 else None
                one.engine.let(99)
                with pytest.raises(TooLate):
                    await one.tokens("k")
                other.engine.let(99)
                assert await other.tokens("k") == expected(3)
                assert other.engine.made == 5
                assert await journaled(client, "k") == 20

        over(server, work)

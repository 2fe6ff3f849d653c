"""Routers as far as requests with a key go: a journal over one Redis, an engine that needs no workers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from support.servers import RedisServer

from keystage.bundle.api import emulated
from keystage.router.engine import Generation, Limits
from keystage.router.face_probe import HashEngine, token_at
from keystage.router.idempotency import KeyBounds, Record, Stamp, name_of
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.idempotency_text import Making
from keystage.router.journal_redis import JournalSettings, RedisJournal
from keystage.router.openai import Call, Dialect
from keystage.router.text import ByteText

LIMITS = Limits(looping=True, context_length=4096, vocab_size=256, max_body_bytes=20_000)
PIPELINE = emulated("tiny", 2, execution="looping")


class PacedEngine(HashEngine):
    """Gives tokens when it is let; counts those it made itself."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.allowed = 0
        self.made = 0
        self._news = asyncio.Event()

    def let(self, tokens: int) -> None:
        """Every session may have so many tokens in all."""
        self.allowed = tokens
        self._news.set()

    async def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine`."""
        ids = self._tokens(request)
        with self._session():
            for position in range(len(request.resumed), len(ids)):
                while position >= self.allowed:
                    self._news.clear()
                    await self._news.wait()
                if (refusal := self._refuse(position)) is not None:
                    raise refusal
                await asyncio.sleep(0)
                self.made += 1
                yield [ids[position]]


class Router:
    """One router's keyed requests."""

    def __init__(self, url: str, **settings: Any) -> None:
        scope = settings.pop("scope", "here:tiny:0")
        chosen = {"kept_s": 60.0, "longest_s": 60.0, "wait_s": 5.0, "lease_s": 30.0} | settings
        self.journal = RedisJournal(JournalSettings(url, scope, **chosen), uuid.uuid4().hex)
        self.keyed = KeyedRequests(KeyBounds(kept_s=60.0), self.journal)
        self.engine = PacedEngine()

    def joined(self, key: str, *, seed: int = 1, most: int = 20, digest: str = "f", position: int = 0) -> Any:
        """Joins a request; see `KeyedRequests.joined`."""
        generation = Generation([1], most, 1.0, 1.0, seed, ())
        call = Call(Dialect.PLAIN, generation, (), True, False, "", False)
        making = Making(self.engine, ByteText(), call, position, has_journal=True)
        return self.keyed.joined(name_of("", key), digest, Stamp(seed, "", 7), making, None)

    async def tokens(self, key: str, **asked: Any) -> list[int]:
        """All tokens of a request."""
        async with self.joined(key, **asked) as record:
            return await self.read(record)

    async def read(self, record: Record, position: int = 0, most: int = 10_000) -> list[int]:
        """Tokens behind a position."""
        found: list[int] = []
        tokens = self.keyed.read(record, position)
        async with contextlib.aclosing(tokens):
            while len(found) < most and (new := await anext(tokens, None)) is not None:
                found += new
        return found

    def crash(self) -> None:
        """Does nothing more, and tells nobody."""
        for task in (*self.journal._tasks, *self.keyed._tasks.values()):
            task.cancel()
        self.journal._orders.clear()

    def stall(self) -> None:
        """Gives no sign of life any more."""
        self.journal._tasks[0].cancel()


@contextlib.asynccontextmanager
async def router(server: RedisServer, **settings: Any) -> AsyncIterator[Router]:
    """A router that runs."""
    made = Router(server.url, **settings)
    made.keyed.start()
    await made.journal._has_tried.wait()
    try:
        yield made
    finally:
        await made.keyed.stop()


def over(server: RedisServer, work: Callable[[Any], Awaitable[None]], within_s: float = 60) -> None:
    """Runs a test over an empty Redis, with a client of it."""

    async def inside() -> None:
        async with asyncio.timeout(within_s), Redis.from_url(server.url) as client:
            await client.flushall()
            await work(client)

    asyncio.run(inside())


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def expected(seed: int, most: int = 20) -> list[int]:
    return [token_at(seed, position, 256) for position in range(most)]


async def journaled(client: Any, key: str) -> int:
    """Tokens of a request that Redis has."""
    (name,) = [n async for n in client.scan_iter(f"*tokens:{name_of('', key)}")] or [None]
    if name is None:
        return 0
    ((entry, _),) = await client.xrevrange(name, count=1)
    return int(entry.split(b"-")[0])

"""The connection of a journal to its Redis: whether it is there, and one bounded wait when it is not.

Under `router.journal_redis`. Nothing here raises because Redis is slow or away: an answer is None then, and
stays None until a sign of life has succeeded. It must not know what is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from keystage.wire.redis_address import Script, shown

log = logging.getLogger(__name__)

CONNECTIONS = 32
AT_ONCE = 28
"""Questions about single requests at a time; the rest is for what is written for all, and signs of life."""
LATELY_S = 1.0
"""A Redis that was lost within this time may be back with the next sign of life: a request waits for that."""

Value = str | int | bytes


class Link:
    """One Redis.

    Args:
        url: its address; the password is never logged.
        wait_s: for one answer.

    Attributes:
        is_away: whether it cannot be asked at present; so it is until the first sign of life.
        losses: times that it was lost.
    """

    def __init__(self, url: str, wait_s: float) -> None:
        self._where = shown(url)
        self._wait_s = wait_s
        self._pool: aioredis.BlockingConnectionPool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=wait_s,
            socket_timeout=wait_s,
            socket_connect_timeout=wait_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = aioredis.Redis(connection_pool=self._pool)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._is_back = asyncio.Event()
        self._is_told = False
        self._lost_at_s = -math.inf
        self.is_away = True
        self.losses = 0

    async def close(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
            await self._pool.disconnect()

    async def beat(self, *command: Value) -> bool:
        """Gives a sign of life; whether Redis took it. It is there again then."""
        is_there = await self._ask(*command) is not None
        if is_there and self.is_away:
            self.is_away = False
            self._is_back.set()
            if self._is_told:
                self._is_told = False
                log.warning("Redis at %s answers again: requests with a key are journaled", self._where)
        return is_there

    async def ask(self, *command: Value) -> Any:
        """An answer, None: Redis is away."""
        return None if self.is_away else await self._ask(*command)

    async def run(self, script: Script, keys: Sequence[str], values: Sequence[Value]) -> Any:
        """What a script answers, None: Redis is away."""
        try:
            return await self.ask("EVALSHA", script.sha1, len(keys), *keys, *values)
        except NoScriptError:  # a Redis that was started anew has none
            return await self.ask("EVAL", script.text, len(keys), *keys, *values)

    async def run_in_turn(self, script: Script, keys: Sequence[str], values: Sequence[Value]) -> Any:
        """The same, for one request of many: a burst waits here, where no time runs."""
        async with self._places:
            return await self.run(script, keys, values)

    async def is_there_soon(self, within_s: float) -> bool:
        """Whether Redis can be asked; one that was lost a moment ago gets a moment to come back."""
        if self.is_away and time.monotonic() - self._lost_at_s < LATELY_S:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_back.wait(), within_s + self._wait_s)
        return not self.is_away

    async def _ask(self, *command: Value) -> Any:
        """Everything that is asked may be asked twice: once more, as a kept connection may have gone."""
        for is_last in (False, True):
            try:
                return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            except NoScriptError:
                raise
            except (RedisError, OSError) as error:
                if is_last or isinstance(error, ResponseError):
                    self._lose(error)
                    break
        return None

    def _lose(self, error: Exception) -> None:
        if not self.is_away:
            self._lost_at_s = time.monotonic()
        self.is_away = True
        self._is_back.clear()
        if not self._is_told:
            self._is_told = True
            self.losses += 1
            what = f"{type(error).__name__}: requests with a key are kept in memory alone"
            log.warning("Redis at %s does not answer (%s)", self._where, what)

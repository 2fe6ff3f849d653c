"""A queue of asynchronous calls in Redis streams: survives gateways and is shared by all of them.

Between `gateway.queue_calls` and `gateway.queue_runner`; see `gateway.queue` for the port and
`gateway.queue_scripts` for what happens inside Redis. An accepted call is there when Redis acknowledged it. A
lease is an entry in the pending list of this gateway's own consumer, renewed while the call runs; what a dead
gateway left is claimed by the others once it was not renewed for a lease. The client never repeats a command
by itself: a put that was not acknowledged is told as such. It must not know how calls are run.

Over 300 lines, since what is held here, when Redis is lost, and what may be claimed are one state.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from keystage.gateway import queue_scripts as scripts
from keystage.gateway.forever import forever
from keystage.gateway.queue import Bounds, Call, Depth, Lease, QueueUnavailable, decode, encode
from keystage.wire.redis_address import Script, shown
from keystage.wire.tasks import end

PREFIX = "{keystage}:async:"
GROUP = "gateways"
CONNECTIONS = 64
SOCKET_S = 5.0
"""For one answer, and for a free connection; then Redis counts as not answering."""
HEAR_S = 0.25
STOP_S = 1.0
RETRY_S = 0.5
IDLE_LEASES = 10
"""Of silence after which a consumer without calls counts as a gateway that ended."""
TELL_S = 10.0
"""Between two lines of the log on the same kind of trouble."""
MAX_DEAD = 1000
"""Given-up calls kept; the oldest go first. With the largest bodies taken by default they have 1 GiB."""
_Value = str | int | bytes
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """A given-up call.

    Attributes:
        entry: its name; begins with the Unix milliseconds at which it was given up.
        function: whose queue it was in.
        reason: why.
        call: the call, None if it cannot be decoded.
    """

    entry: str
    function: str
    reason: str
    call: Call | None


class RedisQueue:
    """See `gateway.queue.CallQueue`.

    Args:
        url: `redis://`, `rediss://` or `unix://` address; its password is never logged.
        bounds: what the queue holds at most, over all gateways that agree on it.
        lease_s: seconds without renewal after which another gateway may run a call.
        consumer: this gateway's name, None for a new one.
    """

    def __init__(self, url: str, bounds: Bounds, lease_s: float, consumer: str | None = None) -> None:
        self._where = shown(url)
        self._bounds = bounds
        self._lease_s = lease_s
        self._consumer = consumer or uuid.uuid4().hex
        self._pool: aioredis.BlockingConnectionPool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=SOCKET_S,
            socket_timeout=SOCKET_S,
            socket_connect_timeout=SOCKET_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = aioredis.Redis(connection_pool=self._pool)
        self._held: set[tuple[str, str]] = set()
        self._claims_from_s = time.monotonic() + lease_s
        self._tidies_at_s = time.monotonic() + lease_s
        self._due_at_s = math.inf
        self._is_lost = False
        self._is_judged = False
        self._is_loss_told = False
        self._told_at_s = {False: -math.inf, True: -math.inf}
        """When a loss, and a refusal, was logged last (monotonic seconds)."""
        self._has_taken = False
        self._stir: Callable[[], None] = _nothing
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, stir: Callable[[], None]) -> None:
        """Begins to work; Redis may come later."""
        self._stir = stir
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(
                forever(self._hear, RETRY_S, "listening for asynchronous calls", self._stopping)
            ),
            loop.create_task(forever(self._renew, RETRY_S, "renewing leases", self._stopping)),
        ]

    async def stop(self) -> None:
        """Leaves the consumer groups and closes the connections."""
        self._stopping.set()
        left = set(self._tasks)
        if left:
            # A connection that is being made is let finish: cancelled then, it may stay open, or go on.
            _, left = await asyncio.wait(left, timeout=STOP_S)
        await end(left)
        if self._has_taken and not self._is_lost:
            with contextlib.suppress(QueueUnavailable, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._tidy(self._consumer)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
            await self._pool.disconnect()

    async def put(self, call: Call) -> None:
        """Accepts a call."""
        payload = encode(call)
        accepted, calls, own_bytes, all_bytes = await self._run(
            scripts.PUT,
            [*_lines(call.function), _key("functions"), _key("bytes")],
            [GROUP, _key("bell"), call.function, payload, self._bounds.entries, self._bounds.size_bytes],
        )
        if not accepted:
            self._bounds.check(
                call.function,
                calls=calls,
                own_bytes=own_bytes,
                all_bytes=all_bytes,
                size_bytes=len(payload),
            )

    async def functions(self) -> Sequence[str]:
        """Names of functions that have calls here."""
        names = await self._ask("SMEMBERS", _key("functions"))
        return sorted(name.decode("utf-8", "replace") for name in names)

    async def take(self, room: Mapping[str, int]) -> list[Lease]:
        """Takes what may be run now."""
        if not room:
            return []
        self._has_taken = True
        claims = time.monotonic() >= self._claims_from_s
        due_ms, taken = await self._run(
            scripts.TAKE,
            [key for function in room for key in _lines(function)],
            [GROUP, self._consumer, max(1, int(self._lease_s * 1000)), int(claims), *room.values()],
        )
        self._due_at_s = math.inf if due_ms < 0 else time.monotonic() + due_ms / 1000
        leases = []
        for function, entries in zip(room, taken, strict=True):
            for entry, fields, losses in entries:
                lease = _lease(function, entry.decode(), fields, losses)
                # Our own lease, renewed too late, is claimed like any other; it runs already.
                if (function, lease.entry) not in self._held:
                    leases.append(lease)
        self._held.update((lease.function, lease.entry) for lease in leases)
        return leases

    async def done(self, lease: Lease) -> None:
        """The call needs no more attempt."""
        await self._settle(lease, "done")

    async def again(self, lease: Lease, call: Call, delay_s: float) -> None:
        """The call is to be tried once more."""
        await self._settle(lease, "again", max(0, int(delay_s * 1000)), encode(call))

    async def bury(self, lease: Lease, reason: str) -> None:
        """The call goes to the dead letters."""
        await self._settle(lease, "bury", reason, MAX_DEAD)

    async def depth(self) -> Mapping[str, Depth]:
        """What is held, by function."""
        names = await self.functions()
        if not names:
            return {}
        found = await self._run(scripts.DEPTH, [key for name in names for key in _lines(name)], [])
        return {name: Depth(calls, age_ms / 1000) for name, (calls, age_ms) in zip(names, found, strict=True)}

    def next_due_s(self) -> float:
        """Seconds until a call's next attempt is due."""
        return max(0.0, self._due_at_s - time.monotonic())

    async def dead_letters(self, after: str = "-", most: int = 100) -> list[DeadLetter]:
        """Given-up calls, oldest first.

        Args:
            after: only those behind this entry.
            most: at most so many.
        """
        begin = after if after == "-" else f"({after}"
        rows = await self._ask("XRANGE", _key("dead"), begin, "+", "COUNT", most)
        letters = []
        for entry, fields in rows:
            stored = {
                key: value.decode("utf-8", "replace") for key, value in fields.items() if key != b"call"
            }
            flat = [part for pair in fields.items() for part in pair]
            call = _lease("", entry.decode(), flat, 0).call
            letters.append(
                DeadLetter(entry.decode(), stored.get(b"function", ""), stored.get(b"reason", ""), call)
            )
        return letters

    async def replay(self, letter: DeadLetter) -> bool:
        """Puts a given-up call back, as if it had never been tried; whether it was still there."""
        assert letter.call is not None, "what cannot be decoded cannot be run"
        call = msgspec.structs.replace(letter.call, attempts=0)
        stream = _lines(call.function)[0]
        keys = [stream, _key("dead"), _key("functions"), _key("bytes")]
        values: list[_Value] = [GROUP, _key("bell"), call.function, encode(call), letter.entry]
        return bool(await self._run(scripts.REPLAY, keys, values))

    async def _settle(self, lease: Lease, what: str, *more: _Value) -> None:
        keys = [*_lines(lease.function), _key("functions"), _key("bytes"), _key("dead")]
        values = [GROUP, _key("bell"), lease.function, lease.entry, what, *more]
        if not await self._run(scripts.SETTLE, keys, values):
            _log.info("function %s: entry %s was settled before", lease.function, lease.entry)
        self._held.discard((lease.function, lease.entry))

    async def _hear(self) -> None:
        """Listens for new calls, so that nobody has to ask all the time."""
        try:
            async with self._redis.pubsub(ignore_subscribe_messages=True) as ears:
                await ears.subscribe(_key("bell"))
                self._stir()
                await self._warn()
                while not self._stopping.is_set():
                    if await ears.get_message(timeout=HEAR_S) is not None:
                        self._stir()
        except (RedisError, OSError) as error:
            self._lose(error)
        await self._pause(RETRY_S)

    async def _warn(self) -> None:
        """Says, once, what of this Redis' settings breaks the queue's promise."""
        if self._is_judged:
            return
        try:
            info: Mapping[str, Any] = await self._redis.info()
        except ResponseError as error:  # it may be forbidden
            self._is_judged = True
            _log.warning("settings of Redis at %s could not be checked: %s", self._where, error)
            return
        self._is_judged = True
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (6, 2):
            _log.warning("Redis at %s has version %s, 6.2 is needed", self._where, version)
        if not info.get("aof_enabled"):
            _log.warning(
                "Redis at %s keeps no append-only file: accepted calls are lost with it", self._where
            )
        if info.get("maxmemory") and str(info.get("maxmemory_policy")).startswith("allkeys"):
            policy = info["maxmemory_policy"]
            _log.warning("Redis at %s may evict accepted calls: maxmemory-policy %s", self._where, policy)

    async def _renew(self) -> None:
        """A third of a lease later: renews what is held; once a lease, tidies up too."""
        await self._pause(self._lease_s / 3)
        if time.monotonic() >= self._tidies_at_s:
            self._tidies_at_s = time.monotonic() + self._lease_s
            with contextlib.suppress(QueueUnavailable):
                await self._tidy()
        held = sorted(self._held)
        if not held:
            return
        functions = sorted({function for function, _ in held})
        values: list[str | int] = [GROUP, self._consumer]
        for function, entry in held:
            values += [functions.index(function) + 1, entry]
        try:
            lost = await self._run(scripts.RENEW, [_lines(f)[0] for f in functions], values)
        except QueueUnavailable:
            return  # told by whoever waits for an answer; leases run on at Redis meanwhile
        for entry in lost:
            _log.debug("lease of entry %s is over or another gateway's", entry)

    async def _tidy(self, leaving: str = "") -> None:
        """Removes consumers that hold nothing: one that leaves, and those that are silent for long."""
        names = await self.functions()
        if names:
            idle_ms = max(1, int(IDLE_LEASES * self._lease_s * 1000))
            await self._run(scripts.TIDY, [_lines(name)[0] for name in names], [GROUP, leaving, idle_ms])

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _run(self, script: Script, keys: Sequence[str], values: Sequence[_Value]) -> Any:
        try:
            return await self._ask("EVALSHA", script.sha1, len(keys), *keys, *values)
        except NoScriptError:  # a Redis that was started anew has none
            return await self._ask("EVAL", script.text, len(keys), *keys, *values)

    async def _ask(self, *command: _Value) -> Any:
        try:
            answer = await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            self._lose(error)
            # Callers need no credentials: where Redis is and what it says is for the log alone.
            raise QueueUnavailable(
                "the asynchronous queue in Redis did not acknowledge this: ask again later (Retry-After)"
            ) from error
        if self._is_lost:
            self._is_lost = self._is_loss_told = False
            # Other gateways get the time to renew what they hold before anything is claimed from them.
            self._claims_from_s = time.monotonic() + self._lease_s
        return answer

    def _lose(self, error: Exception) -> None:
        # A Redis that refuses (no memory, read only) is there, and leases are renewed meanwhile.
        is_refusal = isinstance(error, ResponseError)
        self._is_lost = self._is_lost or not is_refusal
        now_s = time.monotonic()
        if now_s < self._told_at_s[is_refusal] + TELL_S or (not is_refusal and self._is_loss_told):
            return
        self._told_at_s[is_refusal] = now_s
        self._is_loss_told = self._is_loss_told or not is_refusal
        what = "refuses what the asynchronous queue asks" if is_refusal else "does not answer"
        _log.warning("Redis at %s %s: %s", self._where, what, error)


def _key(name: str) -> str:
    return PREFIX + name


def _lines(function: str) -> tuple[str, str]:
    return _key(f"calls:{function}"), _key(f"later:{function}")


def _lease(function: str, entry: str, fields: list[bytes], losses: int) -> Lease:
    stored = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        call = decode(stored[b"call"])
    except KeyError:
        return Lease(function, entry, None, f"entry {entry} has no field `call`", losses)
    except ValueError as error:
        return Lease(function, entry, None, f"entry {entry}: {error}", losses)
    return Lease(function, entry, call, "", losses)


def _nothing() -> None:
    """Before `start`."""

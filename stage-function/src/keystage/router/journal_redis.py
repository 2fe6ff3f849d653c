"""The journal of keyed requests in Redis.

See `router.journal` for the port, `router.journal_scripts` for its steps. What sessions made since the last
look goes out together, in one round trip, and is released to readers when Redis has it: one task writes for
all. A Redis that is slow or away costs at most one bounded wait: then requests are kept in memory alone,
and it is tried again with the next sign of life. What it must still hear of how requests ended is told
then, so that no other router waits for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keystage.router.engine import Failure
from keystage.router.idempotency import JournalStats, Record, Stamp, Whole
from keystage.router.journal import Opened
from keystage.router.journal_link import Link, Value
from keystage.router.journal_owner import Owner
from keystage.router.journal_scripts import OPEN, WRITE
from keystage.router.openai_errors import KeyReused
from keystage.wire.tasks import end

log = logging.getLogger(__name__)

PREFIX = "{keystage}:journal:"
BEATS = 6
"""Signs of life within the time after which a silent router counts as dead."""
MOST_BEAT_S = 0.5
"""Between two of them; so long at most is a Redis that is back taken for away."""
TOGETHER = 512
"""Requests of one round trip."""
MOST_BODY_BYTES = 4 * 1024 * 1024
"""Larger answers are kept in memory alone: writing one would hold up everybody's tokens."""
MOST_UNSAID = 10_000
"""Endings that are told when Redis is back; of those beyond, Redis learns by expiry."""


@dataclasses.dataclass(frozen=True, slots=True)
class JournalSettings:
    """How the journal is kept.

    Attributes:
        url: `redis://`, `rediss://` or `unix://` address; its password is never logged.
        scope: installation, pipeline and parameters: what differs there shares no key.
        kept_s: after an answer was complete, or was last asked for.
        longest_s: that a request may take.
        wait_s: for one answer of Redis.
        lease_s: after which a silent router counts as dead.
    """

    url: str = dataclasses.field(repr=False)
    scope: str
    kept_s: float
    longest_s: float
    wait_s: float = 0.25
    lease_s: float = 3.0


class _Stored(msgspec.Struct, frozen=True):
    """What was drawn for a request."""

    seed: int
    identifier: str
    created_s: int
    deadline_unix_s: float | None = None


class _End(msgspec.Struct, frozen=True):
    """How it ended: with its tokens, with bytes of that type, or with a failure."""

    content_type: str = ""
    code: str = ""
    message: str = ""


@dataclasses.dataclass(slots=True)
class _Order:
    """What is to be told of one request."""

    record: Record
    what: str = ""
    end: bytes = b""
    body: bytes = b""
    said: asyncio.Future[bool] | None = None


class RedisJournal:
    """See `journal.Journal`.

    Args:
        settings: see `JournalSettings`.
        incarnation: this router's, new with every start.
    """

    def __init__(self, settings: JournalSettings, incarnation: str) -> None:
        self._settings = settings
        self._me = incarnation
        self._owner = Owner.this()
        self._prefix = f"{PREFIX}{settings.scope}:"
        self._beat_s = min(settings.lease_s / BEATS, MOST_BEAT_S)
        self._link = Link(settings.url, settings.wait_s)
        self._has_tried = asyncio.Event()
        self._has_orders = asyncio.Event()
        self._orders: dict[str, _Order] = {}
        self._unsaid: dict[str, _Order] = {}
        self._on_fenced: Callable[[Record], None] = lambda _record: None
        self._tasks: list[asyncio.Task[None]] = []
        self._round_trips = self._tokens = self._taken_over = 0

    @property
    def is_away(self) -> bool:
        """See `Journal`."""
        return self._link.is_away

    @property
    def stats(self) -> JournalStats:
        """See `Journal`."""
        link = self._link
        return JournalStats(link.is_away, link.losses, self._round_trips, self._tokens, self._taken_over)

    def start(self, on_fenced: Callable[[Record], None]) -> None:
        """See `Journal`."""
        self._on_fenced = on_fenced
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._live()), loop.create_task(self._write_all())]

    async def stop(self) -> None:
        """See `Journal`."""
        await end(self._tasks)
        await self._link.ask("DEL", self._life)
        await self._link.close()

    async def open(self, record: Record) -> Opened:
        """See `Journal`."""
        await self._has_tried.wait()
        self._unsaid.pop(record.name, None)
        gone = ""
        tries = 2
        while tries and await self._link.is_there_soon(self._beat_s):
            answer = await self._link.run_in_turn(OPEN, self._keys(record), self._opening(record, gone))
            if answer is None:
                tries -= 1
                # It may have been done all the same; nobody is to wait for what is not journaled here.
                self._unsaid[record.name] = _Order(record, "leave")
                continue
            self._unsaid.pop(record.name, None)
            match answer[0]:
                case b"new":
                    record.journaled = 0
                    return Opened.OURS
                case b"other":
                    raise KeyReused
                case b"held":
                    owner, life = answer[3].decode(), answer[4]
                    if not gone and _is_gone(life, self._owner.node):
                        gone = owner
                        continue
                    record.journaled = None
                    self._fill(record, answer)
                    return Opened.HELD
                case b"ended":
                    self._fill(record, answer)
                    _conclude(record, answer[3], answer[4])
                    return Opened.ENDED
                case _:
                    self._fill(record, answer)
                    # A record that was begun here may have more than Redis heard of.
                    record.journaled = min(len(record.tokens), int(answer[4].split(b"-")[0]))
                    if answer[3] not in (b"", self._me.encode()):
                        self._taken_over += 1
                        log.info("went on with a request of router %s", answer[3].decode()[:12])
                    return Opened.OURS
        return Opened.AWAY

    def write(self, record: Record) -> None:
        """See `Journal`."""
        if record.name not in self._orders:
            self._orders[record.name] = _Order(record)
            self._has_orders.set()

    async def close(self, record: Record) -> bool:
        """See `Journal`."""
        end, body = _End(), b""
        if record.refusal is not None:
            end = _End(code=record.refusal.code, message=str(record.refusal))
        elif record.whole is not None:
            body = record.whole.body
            if len(body) > MOST_BODY_BYTES:
                return await self._order(record, "forget")
            end = _End(content_type=record.whole.content_type.decode("latin-1"))
        return await self._order(record, "end", msgspec.json.encode(end), body)

    async def leave(self, record: Record) -> None:
        """See `Journal`."""
        await self._order(record, "leave")

    async def forget(self, record: Record) -> None:
        """See `Journal`."""
        await self._order(record, "forget")

    # ------------------------------------------------------------ what is told

    async def _order(self, record: Record, what: str, end: bytes = b"", body: bytes = b"") -> bool:
        said: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._orders[record.name] = _Order(record, what, end, body, said)
        self._has_orders.set()
        return await said

    async def _write_all(self) -> None:
        while True:
            await self._has_orders.wait()
            self._has_orders.clear()
            while self._orders:
                orders = [self._orders.pop(name) for name in list(self._orders)[:TOGETHER]]
                # What another router owns by now, or is not journaled, has nothing to write.
                orders = [order for order in orders if order.what or order.record.journaled is not None]
                if not orders:
                    continue
                try:
                    await self._tell(orders)
                except Exception:  # a bug: readers get their tokens all the same
                    log.exception("requests with a key could not be journaled")
                    for order in orders:
                        self._settle(order, len(order.record.tokens), None)

    async def _tell(self, orders: Sequence[_Order]) -> None:
        """Tells Redis what is new of some requests, and their readers what Redis has."""
        keys: list[str] = []
        values: list[Value] = [self._me, _ms(self._settings.kept_s)]
        counts: list[int] = []
        for order in orders:
            record = order.record
            counts.append(len(record.tokens))
            new = b"" if record.journaled is None else record.tokens[record.journaled :].tobytes()
            keys += self._keys(record)
            values += [counts[-1], new, order.what, order.end, order.body]
        verdicts = await self._link.run(WRITE, keys, values)
        if verdicts is None:
            verdicts = [None] * len(orders)
        else:
            self._round_trips += 1
        for order, count, verdict in zip(orders, counts, verdicts, strict=True):
            self._settle(order, count, verdict)

    def _settle(self, order: _Order, count: int, verdict: int | None) -> None:
        record = order.record
        if verdict == 0:
            if order.said is None:
                self._on_fenced(record)
        elif verdict == 2:
            record.journaled = None
        elif verdict == 1 and record.journaled is not None:
            self._tokens += count - record.journaled
            record.journaled = count
        elif verdict is None and order.what and len(self._unsaid) < MOST_UNSAID:
            # Bytes are not kept for that: without them the answer is made anew where it is asked for.
            what = "forget" if order.body else order.what
            self._unsaid[record.name] = _Order(record, what, order.end)
        if verdict != 0:
            record.release(count)
        if order.said is not None and not order.said.done():
            order.said.set_result(verdict != 0)

    # ------------------------------------------------------------ Redis

    @property
    def _life(self) -> str:
        return f"{self._prefix}router:{self._me}"

    def _keys(self, record: Record) -> list[str]:
        return [f"{self._prefix}request:{record.name}", f"{self._prefix}tokens:{record.name}"]

    def _opening(self, record: Record, gone: str) -> list[Value]:
        settings, stamp = self._settings, record.stamp
        stored = _Stored(stamp.seed, stamp.identifier, stamp.created_s, record.deadline_unix_s)
        left_s = 0.0 if record.deadline_unix_s is None else record.deadline_unix_s - time.time()
        expires_s = max(settings.longest_s, left_s) + settings.kept_s
        return [
            record.fingerprint,
            msgspec.json.encode(stored),
            self._me,
            _ms(expires_s),
            _ms(settings.kept_s),
            len(record.tokens),
            gone,
            f"{self._prefix}router:",
        ]

    def _fill(self, record: Record, answer: Sequence[Any]) -> None:
        """Puts what the journal has into a record."""
        stored = msgspec.json.decode(answer[1], type=_Stored)
        record.stamp = Stamp(stored.seed, stored.identifier, stored.created_s)
        if answer[0] == b"ours" and answer[3] not in (b"", self._me.encode()):
            record.deadline_unix_s = stored.deadline_unix_s
        record.is_found = True
        for entry, fields in answer[2]:
            count = int(entry.split(b"-")[0])
            packed = dict(zip(fields[::2], fields[1::2], strict=True))[b"t"]
            first = count - len(packed) // record.tokens.itemsize
            if first > len(record.tokens):
                log.error("tokens %d to %d of a request are not in the journal", len(record.tokens), first)
                break  # they are made again
            del record.tokens[first:]
            record.tokens.frombytes(packed)
        record.release(len(record.tokens))

    async def _live(self) -> None:
        """Says that this router lives, and finds out whether Redis does."""
        while True:
            try:
                await self._beat()
            except Exception:  # a bug: the next one may do
                log.exception("a sign of life failed")
            self._has_tried.set()
            await asyncio.sleep(self._beat_s)

    async def _beat(self) -> None:
        life = msgspec.json.encode(self._owner)
        is_there = await self._link.beat("SET", self._life, life, "PX", _ms(self._settings.lease_s))
        if is_there and self._unsaid:
            self._orders = {**self._unsaid, **self._orders}
            self._unsaid = {}
            self._has_orders.set()


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _is_gone(life: bytes, node: str) -> bool:
    try:
        return msgspec.json.decode(life, type=Owner).is_gone(node)
    except msgspec.DecodeError:  # of another version: its lease decides
        return False


def _conclude(record: Record, end: bytes, body: bytes) -> None:
    """How a request of the journal ended."""
    told = msgspec.json.decode(end, type=_End)
    if told.code:
        record.refusal = Failure(told.message)
        record.refusal.code = told.code
    elif told.content_type:
        record.whole = Whole(body, told.content_type.encode("latin-1"))

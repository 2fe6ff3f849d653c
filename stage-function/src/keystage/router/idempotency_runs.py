"""Keyed requests run here: one task each, any number of readers, a grace when none is left.

Between the HTTP face (`router.idempotency_http`, `router.face`) and the engine. The task of a request makes
its answer whether or not somebody reads; a reader takes what is released of the record. With a journal,
tokens are released when the journal has them. `router.idempotency` says what is kept; this module has the
clock and the tasks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from keystage.router.engine import Failure, Refusal, TooLate
from keystage.router.idempotency import (
    KeyBounds,
    KeyStats,
    Record,
    Stamp,
    Standing,
    Table,
    Whole,
    is_kept,
    is_resumable,
)
from keystage.router.journal import Journal, Opened
from keystage.router.openai_errors import FieldRefused, KeyReused, RouterLeaves
from keystage.wire.tasks import end

log = logging.getLogger(__name__)

FOLLOW_S = 0.1
"""Between two looks at what another router has made of a request."""
LAST_WORD_S = 2.0
"""A request whose router stops may tell the journal so for so long, before it is cancelled again."""

Emit = Callable[[Sequence[int]], None]
Work = Callable[[Record, Emit], Awaitable[Whole | None]]
"""Makes an answer: gives the tokens behind those of the record to `Emit`, or returns its bytes."""


class KeyedRequests:
    """All requests with a key of one router.

    Args:
        bounds: what is kept, and how long.
        journal: keeps it beyond this process, None: nothing does.

    Attributes:
        counts: requests with a key by what was there: `new`, `running`, `kept`, `resumed`, `reused`.
        fenced: requests that another router took over while this one had them.
    """

    def __init__(self, bounds: KeyBounds, journal: Journal | None = None) -> None:
        self.table = Table(bounds)
        self.journal = journal
        self.counts = dict.fromkeys(("new", "running", "kept", "resumed", "reused"), 0)
        self.fenced = 0
        self._tasks: dict[Record, asyncio.Task[None]] = {}
        self._taken: set[Record] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_leaving = False

    def start(self) -> None:
        """Begins to work, on the running event loop."""
        if self.journal is not None:
            self.journal.start(self._on_fenced)

    async def stop(self) -> None:
        """Ends what runs, so that another router may go on with it."""
        self._is_leaving = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await end(self._tasks.values(), LAST_WORD_S)
        if self.journal is not None:
            await self.journal.stop()

    def stats(self) -> KeyStats:
        """What is counted."""
        journal = None
        if self.journal is not None:
            journal = dataclasses.replace(self.journal.stats, fenced=self.fenced)
        return KeyStats(dict(self.counts), len(self.table), self.table.nbytes, journal)

    @asynccontextmanager
    async def joined(
        self, name: str, fingerprint: str, stamp: Stamp, work: Work, deadline_s: float | None
    ) -> AsyncIterator[Record]:
        """The record of a request; while inside, it has a reader.

        Args:
            name: see `idempotency.name_of`.
            fingerprint: see `idempotency.fingerprint_of`.
            stamp: what is drawn for it, if it is new.
            work: makes its answer, if nobody does and it has none.
            deadline_s: seconds it may take then, None for the pipeline's default.

        Raises:
            KeyReused: the key is another request's.
        """
        record = self.table.find(name, time.monotonic())
        if record is not None and record.fingerprint != fingerprint:
            self.counts["reused"] += 1
            raise KeyReused
        if record is None:
            record = Record(name, fingerprint, stamp)
            self.counts["new"] += 1
            self._begin(record, work, deadline_s)
        elif record.standing is Standing.PAUSED:
            record.resume()
            self.counts["resumed"] += 1
            self._begin(record, work, deadline_s)
        else:
            self.counts["running" if record.standing is Standing.RUNNING else "kept"] += 1
        record.readers += 1
        record.idle_s = None
        try:
            yield record
        finally:
            record.readers -= 1
            self._left(record)

    async def read(self, record: Record, position: int) -> AsyncGenerator[list[int], None]:
        """The tokens behind a position, as they come.

        Raises:
            Refusal: why it has no (complete) answer.
        """
        while True:
            if record.released > position:
                new = record.tokens[position : record.released].tolist()
                position += len(new)
                yield new
            elif record.standing is Standing.RUNNING:
                await _news(record)
            elif record.refusal is not None:
                raise record.refusal.with_traceback(None)
            else:
                return

    async def whole(self, record: Record) -> Whole:
        """The finished bytes.

        Raises:
            Refusal: why it has none.
        """
        while record.standing is Standing.RUNNING:
            await _news(record)
        if record.refusal is not None:
            raise record.refusal.with_traceback(None)
        assert record.whole is not None
        return record.whole

    async def reach(self, record: Record, position: int) -> None:
        """Waits until a reader that has so many tokens can go on.

        Raises:
            FieldRefused: nobody can have so many.
            Refusal: why it has no (complete) answer.
        """
        while record.standing is Standing.RUNNING and not record.is_opened:
            await _news(record)
        while record.released < position:
            # What was made before this process may have been sent further than it was kept.
            if record.standing is not Standing.RUNNING or not record.is_found:
                if record.refusal is not None:
                    raise record.refusal.with_traceback(None)
                raise FieldRefused(
                    "invalid_value",
                    f"Last-Event-ID {position} is beyond the {record.released} tokens sent so far",
                    param="Last-Event-ID",
                )
            await _news(record)

    # ------------------------------------------------------------ inside

    def _begin(self, record: Record, work: Work, deadline_s: float | None) -> None:
        record.deadline_unix_s = None if deadline_s is None else time.time() + deadline_s
        self.table.run(record)
        self._tasks[record] = asyncio.get_running_loop().create_task(self._run(record, work))

    def _left(self, record: Record) -> None:
        """A reader has gone; without any the request goes on for a grace."""
        task = self._tasks.get(record)
        if record.readers or task is None:
            return
        record.idle_s = time.monotonic()
        asyncio.get_running_loop().call_later(
            self.table.bounds.grace_s, self._end_grace, record, record.idle_s
        )

    def _end_grace(self, record: Record, idle_s: float) -> None:
        task = self._tasks.get(record)
        if task is not None and record.idle_s == idle_s:
            task.cancel()

    def _on_fenced(self, record: Record) -> None:
        task = self._tasks.get(record)
        if task is not None and record.journaled is not None and record not in self._taken:
            self.fenced += 1
            self._taken.add(record)
            task.cancel()

    async def _run(self, record: Record, work: Work) -> None:
        try:
            while not await self._made_or_stopped(record, work):
                pass
        except asyncio.CancelledError:  # told twice to end
            record.refusal = RouterLeaves()
            self._rest(record, Standing.PAUSED)
        finally:
            self._taken.discard(record)
            del self._tasks[record]

    async def _made_or_stopped(self, record: Record, work: Work) -> bool:
        """Makes the answer; False: it stopped for want of readers, and meanwhile there is one again."""
        try:
            while not await self._attempt(record, work):
                pass
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return await self._stop(record)
        except Refusal as refusal:
            if is_resumable(refusal):
                await self._leave(record)
                record.refusal = refusal
                self._rest(record, Standing.PAUSED)
            else:
                await self._drop(record, refusal)
        except Exception:  # a bug: clients are told, the log has it
            log.exception("a request with a key failed in the router")
            await self._drop(record, Failure("the router failed on this request"))
        return True

    async def _stop(self, record: Record) -> bool:
        """It stops where it is, and whoever asks for it again makes it go on; False: somebody has by now."""
        await self._leave(record)
        if record.readers and not self._is_leaving:
            return False
        record.refusal = RouterLeaves()
        self._rest(record, Standing.PAUSED)
        return True

    async def _attempt(self, record: Record, work: Work) -> bool:
        """Makes the answer, or looks on while another router does; False: look again."""
        opened = await self.journal.open(record) if self.journal is not None else Opened.AWAY
        record.is_opened = True
        record.tell()
        if opened is Opened.HELD:
            if record.deadline_unix_s is not None and record.deadline_unix_s < time.time():
                raise TooLate("the deadline passed while another router made the answer")
            await asyncio.sleep(FOLLOW_S)
            return False
        if opened is Opened.ENDED:
            self._rest(record, Standing.ENDED)
            return True
        try:
            try:
                record.whole = await work(record, lambda tokens: self._made(record, tokens))
            except Refusal as refusal:
                if not is_kept(refusal):
                    raise
                record.refusal = refusal
            if self.journal is not None and record.journaled is not None:
                is_ours = await self.journal.close(record)
                if not is_ours:
                    record.rewind()
                    record.journaled = None
                    return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if record not in self._taken or task is None or task.uncancel():
                raise
            self._taken.discard(record)
            record.rewind()
            record.journaled = None
            return False
        self._rest(record, Standing.ENDED)
        return True

    def _made(self, record: Record, tokens: Sequence[int]) -> None:
        record.tokens.extend(tokens)
        if self.journal is not None and record.journaled is not None:
            self.journal.write(record)
        else:
            record.release(len(record.tokens))

    async def _leave(self, record: Record) -> None:
        record.whole = None
        if self.journal is not None and record.journaled is not None:
            await self.journal.leave(record)

    async def _drop(self, record: Record, refusal: Refusal) -> None:
        """It is refused, and nothing is kept of it."""
        record.refusal = refusal
        self.table.forget(record)
        if self.journal is not None and record.journaled is not None:
            await self.journal.forget(record)
        record.end(Standing.ENDED)

    def _rest(self, record: Record, standing: Standing) -> None:
        self.table.rest(record, time.monotonic())
        record.end(standing)
        if self._sweeper is None and not self._is_leaving:
            self._sweep()

    def _sweep(self) -> None:
        """Forgets what is old even if nobody asks any more."""
        self.table.expire(time.monotonic())
        self._sweeper = None
        if len(self.table) and not self._is_leaving:
            wait_s = max(0.1, self.table.bounds.kept_s / 4)
            self._sweeper = asyncio.get_running_loop().call_later(wait_s, self._sweep)


async def _news(record: Record) -> None:
    news = asyncio.get_running_loop().create_future()
    record.when_news(lambda: None if news.done() else news.set_result(None))
    await news

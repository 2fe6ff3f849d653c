"""Runs what waits in the queue: takes calls as slots are free, tries them, settles them.

Between `gateway.queue` (where calls wait) and `gateway.queue_attempt` (one try). A call is settled
after its callback: done, to be tried again later, or given up. What cannot be settled because the
store is away is settled when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from keystage.gateway.forever import forever
from keystage.gateway.queue import Call, CallQueue, Depth, Lease, QueueUnavailable
from keystage.gateway.queue_attempt import Attempts, Outcome
from keystage.gateway.queue_backoff import Backoff
from keystage.gateway.queue_callback import Callbacks
from keystage.gateway.queue_slots import Slots
from keystage.wire.tasks import end

LOOK_S = 1.0
"""Between two looks at the queue when nobody rings."""
DEPTH_S = 2.0
RECONNECT = Backoff(attempts=0, base_s=0.1, cap_s=2.0)
PUT_BACK_S = 1.0
RETRY_S = 1.0
"""After what nobody foresaw."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RetryRules:
    """What is tried again.

    Attributes:
        backoff: how often, and how long between.
        codes: statuses of a function that are no final answer. An attempt without an answer (no replica,
            a broken connection, a time-out) is always tried again.
    """

    backoff: Backoff
    codes: frozenset[int]


class Runner:
    """The worker of one gateway.

    Args:
        queue: where calls come from.
        attempts: runs one try.
        callbacks: delivers answers.
        slots: how many run at once.
        rules: what is tried again.
        drain_s: seconds that running calls get when the gateway stops.

    Attributes:
        counts: events since the start, by (name, function): `retries`, `dead_letters`, `callbacks`,
            `callback_failures`.
        depths: what the queue held a moment ago, by function.
    """

    def __init__(
        self,
        queue: CallQueue,
        attempts: Attempts,
        callbacks: Callbacks,
        slots: Slots,
        rules: RetryRules,
        drain_s: float,
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.depths: Mapping[str, Depth] = {}
        self._queue = queue
        self._attempts = attempts
        self._callbacks = callbacks
        self._slots = slots
        self._rules = rules
        self._drain_s = drain_s
        self._stirred = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._failures = 0
        """Looks at the queue, one after the other, for which the store was away."""

    def running(self) -> dict[str, int]:
        """Calls in flight here, by function."""
        return self._slots.running()

    async def start(self) -> None:
        """Begins to take calls."""
        await self._attempts.start()
        await self._callbacks.start()
        await self._queue.start(self._stirred.set)
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(forever(self._follow, RETRY_S, "taking asynchronous calls", self._stopping)),
            loop.create_task(forever(self._measure, RETRY_S, "measuring the queue", self._stopping)),
        ]

    async def stop(self) -> None:
        """Takes nothing more, lets running calls end in time, and puts back the rest."""
        self._stopping.set()
        self._stirred.set()
        if self._loops:
            # The look at the queue that is under way ends by itself: what it takes must be put back.
            await asyncio.gather(*self._loops, return_exceptions=True)
        if self._running:
            await asyncio.wait(list(self._running), timeout=self._drain_s)
        left = dict(self._running)
        await end(left)
        ends = await asyncio.gather(*map(self._put_back, left.values()), return_exceptions=True)
        for error in filter(None, ends):
            _log.error("a call is left to be claimed by another gateway", exc_info=error)
        await self._queue.stop()
        await self._callbacks.stop()
        await self._attempts.stop()

    async def _follow(self) -> None:
        """One look at the queue."""
        self._stirred.clear()
        try:
            room = self._slots.room(await self._queue.functions())
            leases = await self._queue.take(room)
        except QueueUnavailable as error:
            if not self._failures:
                _log.warning("no asynchronous call can be taken: %s", error)
            self._failures += 1
            await self._pause(RECONNECT.delay_s(self._failures, random.random()))
            return
        if self._failures:
            _log.info("asynchronous calls are taken again, after %d failures", self._failures)
            self._failures = 0
        for lease in leases:
            self._begin(lease)
        if not leases:
            # What is due already was left for want of a slot; its end rings.
            due_s = self._queue.next_due_s()
            await self._rest(min(LOOK_S, due_s) if due_s > 0 else LOOK_S)

    async def _measure(self) -> None:
        # The last figures stand while the store is away.
        with contextlib.suppress(QueueUnavailable):
            self.depths = await self._queue.depth()
        await self._pause(DEPTH_S)

    def _begin(self, lease: Lease) -> None:
        self._slots.begin(lease.function)
        task = asyncio.get_running_loop().create_task(self._run(lease))
        self._running[task] = lease
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        lease = self._running.pop(task)
        self._slots.end(lease.function)
        self._stirred.set()

    async def _run(self, lease: Lease) -> None:
        try:
            await self._carry(lease)
        except Exception as error:  # noqa: BLE001
            # A call that we cannot send (say, a header that is none) must neither end the others nor be
            # taken again and again: it becomes a dead letter that says why.
            _log.exception("function %s: entry %s", lease.function, lease.entry)
            await self._bury(lease, f"it cannot be run: {error!r}")

    async def _carry(self, lease: Lease) -> None:
        call = lease.call
        most = self._rules.backoff.attempts
        if call is None:
            await self._bury(lease, lease.trouble)
        elif call.attempts + lease.losses >= most:
            reason = f"a gateway ended while it ran, {lease.losses} times; {call.attempts} attempts failed"
            await self._answer(call, Outcome(502, "text/plain", f"{reason}\n".encode(), is_answer=False))
            await self._bury(lease, reason)
        else:
            outcome = await self._attempts.run(call)
            failures = call.attempts + lease.losses + 1
            if outcome.is_answer and outcome.own_status not in self._rules.codes:
                await self._answer(call, outcome)
                await self._settle(lambda: self._queue.done(lease))
            elif failures < most:
                await self._again(lease, call, failures, outcome)
            else:
                await self._answer(call, outcome)
                said = outcome.body[:200].decode("utf-8", "replace").strip()
                what = f"status {outcome.own_status}" + ("" if outcome.is_answer else f": {said}")
                await self._bury(lease, f"{failures} attempts failed, the last with {what}")

    async def _again(self, lease: Lease, call: Call, failures: int, outcome: Outcome) -> None:
        backoff = self._rules.backoff
        delay_s = max(backoff.delay_s(failures, random.random()), min(outcome.retry_after_s, backoff.cap_s))
        self.counts["retries", lease.function] += 1
        later = msgspec.structs.replace(call, attempts=failures)
        await self._settle(lambda: self._queue.again(lease, later, delay_s))

    async def _bury(self, lease: Lease, reason: str) -> None:
        self.counts["dead_letters", lease.function] += 1
        called = "" if lease.call is None else lease.call.id
        _log.warning("function %s: call %r is given up: %s", lease.function, called, reason)
        await self._settle(lambda: self._queue.bury(lease, reason))

    async def _answer(self, call: Call, outcome: Outcome) -> None:
        if call.callback:
            is_taken = await self._callbacks.deliver(call, outcome)
            self.counts["callbacks" if is_taken else "callback_failures", call.function] += 1

    async def _settle(self, step: Callable[[], Awaitable[None]]) -> None:
        """Until the store took it: a call that ran must not run again because the store was away."""
        failures = 0
        while True:
            try:
                await step()
                return
            except QueueUnavailable:
                failures += 1
                await asyncio.sleep(RECONNECT.delay_s(failures, random.random()))

    async def _put_back(self, lease: Lease) -> None:
        call = lease.call
        if call is None:
            return
        try:
            async with asyncio.timeout(PUT_BACK_S):
                await self._queue.again(lease, call, 0.0)
        except (QueueUnavailable, TimeoutError):
            _log.warning(
                "function %s: call %r is left to be claimed by another gateway", call.function, call.id
            )

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stirred.wait(), seconds)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

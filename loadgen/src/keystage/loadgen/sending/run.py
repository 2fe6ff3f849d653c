"""Sends a whole plan, open loop, from as many processes as it takes: the entry of `sending`.

Comes after `plan` and `target`, before `measures`. Each process takes every n-th request, all start at one
moment of the monotonic clock, and their rows come back merged, in schedule order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Sequence

from keystage.loadgen.plan import Plan
from keystage.loadgen.sending.parts import Count, Manner, Parts
from keystage.loadgen.sending.processes import Faced, Processes, SenderError
from keystage.loadgen.sending.route import Version
from keystage.loadgen.sending.row import Progress, Row
from keystage.loadgen.target import Target

LEAD_S = 0.1
"""From all being ready to the start: the start's word reaches every process before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What a run of the sender yields.

    Attributes:
        rows: one a request, in schedule order.
        processes: how many sent.
        told: see `Faced`; with faults the run is no result.
    """

    rows: list[Row]
    processes: int
    told: Faced

    @property
    def retried(self) -> int:
        """Attempts beyond the first of each request."""
        return sum(row.attempts - 1 for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What the reader of a report must know of the sending, in words."""
        told = [*(f"generator: {fault}" for fault in self.told.faults), *self.told.notes]
        if self.retried:
            told.append(f"{self.retried} attempts were retries; latency counts from the first scheduled time")
        if self.told.moved:
            told.append(
                f"{self.told.moved} requests met a kept connection that the server had ended before any byte "
                "of them, and went to another one; no attempt is counted for that"
            )
        return told


class Sender:
    """A plan in the hands of processes that are ready to send it.

    Args:
        rows: of the plan.
        processes: started.
        end_s: when every request has ended, seconds from the start.
    """

    def __init__(self, rows: list[Row], processes: Processes, end_s: float) -> None:
        self._rows = rows
        self._processes = processes
        self._end_s = end_s

    @property
    def pids(self) -> list[int]:
        """Ids of the sending processes."""
        return self._processes.pids

    async def send(self, start_s: float | None = None, ended: Progress | None = None) -> Sent:
        """Sends everything and returns when all requests have ended. Once only.

        Args:
            start_s: `time.monotonic()` of the start; a moment from now, if None.
            ended: called with each row when its request has ended.
        """
        start_s = time.monotonic() + LEAD_S if start_s is None else start_s
        bound_s = start_s - time.monotonic() + self._end_s
        told, unknown = await self._processes.send(start_s, bound_s, ended)
        lose(unknown, told.faults, ended)
        return Sent(self._rows, len(self.pids), told)

    def broken_off(self, at_s: float, ended: Progress) -> Sent:
        """What a run yields that was cancelled `at_s` seconds after its start."""
        rows = so_far(self._rows, self._processes.known, at_s, ended)
        return Sent(rows, len(self.pids), self._processes.told)


@contextlib.asynccontextmanager
async def prepared(
    plan: Plan,
    target: Target,
    *,
    processes: Count = "auto",
    timeout_s: float = 300.0,
    http: Version = "1.1",
    retries: int = 0,
) -> AsyncIterator[Sender]:
    """Starts processes and gives them a plan; they end with the context.

    Args:
        plan: what is sent when.
        target: how; its address is replaced by the plan's, where the plan has any.
        processes: how many; `auto` follows the plan's busiest second.
        timeout_s: a request fails this long after it was sent, all its attempts included.
        http: version of HTTP.
        retries: how often a request that failed before its answer, or was answered 429, 502, 503 or 504, is
            sent again.

    Raises:
        ValueError: a setting out of bounds.
        RouteError: an address that cannot be sent to.
        SenderError: a process cannot be started, or did not come up.
    """
    parts = Parts(plan, target, Manner(timeout_s, http, retries))
    count = parts.count(processes)
    made = Processes([functools.partial(parts.part, first, count) for first in range(count)], parts.rows)
    try:
        await made.start()
        yield Sender(parts.rows, made, parts.end_s)
    finally:
        await made.close()


def lose(rows: Sequence[Row], faults: Sequence[str], ended: Progress | None) -> None:
    """Marks rows of which nothing is known because of these faults."""
    for row in rows:
        row.error = f"generator: {'; '.join(faults)}"
        row.last_s = row.sent_s = row.scheduled_s
        if ended is not None:
            ended(row)


def so_far(rows: Sequence[Row], known: Sequence[int], at_s: float, ended: Progress) -> list[Row]:
    """Rows that have ended, and those under way: left out they would make a target that stalls look fast."""
    begun = [row for row in rows if known[row.index] or row.scheduled_s <= at_s]
    lose([row for row in begun if not known[row.index]], ["under way when the run was broken off"], ended)
    return begun


def run_plan(
    plan: Plan,
    target: Target,
    *,
    processes: Count = "auto",
    timeout_s: float = 300.0,
    http: Version = "1.1",
    retries: int = 0,
    ended: Progress | None = None,
) -> list[Row]:
    """Sends a plan and returns its rows, in schedule order; arguments as of `prepared` and `Sender.send`.

    Raises:
        SenderError: a process died; holds the rows that are known.
        ValueError: a setting out of bounds.
        RouteError: an address that cannot be sent to.
    """

    async def sent() -> Sent:
        async with prepared(
            plan, target, processes=processes, timeout_s=timeout_s, http=http, retries=retries
        ) as sender:
            return await sender.send(ended=ended)

    made = asyncio.run(sent())
    if made.told.faults:
        raise SenderError(made.told.faults, made.rows)
    return made.rows

"""A closed loop: clients that each send their next request when the last one ended.

Not how independent users arrive. A target that slows down is sent less, so the queue that users would
have met does not form, and no latency shows it (Schroeder, Wierman and Harchol-Balter, "Open versus
closed: a cautionary tale", NSDI 2006). `capacity` uses it to find a throughput; `--closed-loop` reports
its latencies with that warning.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import numpy as np

from keystage.loadgen.options import DEFAULT_DURATION_S, MAX_REQUESTS, LoadOptions
from keystage.loadgen.plan import Bodies, Plan, drawn_sizes
from keystage.loadgen.sender import Progress, Row, send
from keystage.loadgen.sending.processes import Faced
from keystage.loadgen.sending.run import Sent
from keystage.loadgen.target import Target

VARIETY = 65_536
"""Different token lengths; a loop does not know how many it will send, and begins again after these."""

_PAUSE_S = 0.1

Send = Callable[[Row, bytes], Awaitable[None]]
"""Sends one request and fills its row."""


async def run(
    send: Send,
    bodies: Sequence[bytes],
    *,
    clients: int,
    duration_s: float,
    think_s: float = 0.0,
    start_s: float | None = None,
    ended: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Keeps `clients` clients sending for `duration_s`, and waits for the answers that are still to come.

    Clients begin spread evenly over `think_s`. One whose request failed waits a moment, so that a target
    that refuses at once is not asked as fast as the machine can.

    Args:
        send: sends one request.
        bodies: sent in turn, from the start again when used up.
        clients: how many.
        duration_s: no request is sent after it.
        think_s: wait of a client between answer and next request.
        start_s: `time.monotonic()` of the start; now, if None.
        ended: called with each row when its request has ended.

    Returns:
        Rows in the order in which their clients were ready to send, which is `scheduled_s`.
    """
    start_s = time.monotonic() if start_s is None else start_s
    endless = itertools.cycle(range(len(bodies)))
    rows: list[Row] = []

    async def work(first_s: float) -> None:
        await asyncio.sleep(max(start_s + first_s - time.monotonic(), 0.0))
        while (now_s := time.monotonic() - start_s) < duration_s and len(rows) < MAX_REQUESTS:
            row = Row(len(rows), now_s)
            rows.append(row)
            await send(row, bodies[next(endless)])
            if ended is not None:
                ended(row)
            pause_s = min(_PAUSE_S, duration_s / 20) if row.error else 0.0
            if max(think_s, pause_s) > 0:
                await asyncio.sleep(max(think_s, pause_s))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(work(think_s * number / clients))
    return rows


class ClosedLoop:
    """Sends as `sending.run.Sender` does, from one process, but in a closed loop.

    Args:
        options: with `closed_loop`.
        target: what is called.
        session: HTTP client.
    """

    def __init__(self, options: LoadOptions, target: Target, session: aiohttp.ClientSession) -> None:
        self._options, self._target, self._session = options, target, session
        self._ended: list[Row] = []

    async def send(self, start_s: float, ended: Progress | None = None) -> Sent:
        """Keeps the clients sending until the run's duration is over and all answers have come."""

        async def ask(row: Row, body: bytes) -> None:
            await send(self._session, self._target, row, body, start_s)

        def took(row: Row) -> None:
            self._ended.append(row)
            if ended is not None:
                ended(row)

        assert self._options.closed_loop is not None
        rows = await run(
            ask,
            bodies_of(self._options, self._target),
            clients=self._options.closed_loop,
            duration_s=self._options.duration_s or DEFAULT_DURATION_S,
            think_s=self._options.think_s or 0.0,
            start_s=start_s,
            ended=took,
        )
        return Sent(rows, 1, Faced())

    def broken_off(self, _at_s: float, _ended: Progress) -> Sent:
        """As `sending.run.Sender.broken_off`, without what was under way: as many as clients at the most."""
        return Sent(sorted(self._ended, key=lambda row: row.index), 1, Faced())


def bodies_of(options: LoadOptions, target: Target, count: int = MAX_REQUESTS) -> Bodies:
    """What the clients send: the first `count` requests."""
    sizes = drawn_sizes(options, target, VARIETY, options.seed)
    return Bodies(target, sizes, options.seed, range(count))


def plan_of(options: LoadOptions, target: Target, rows: Sequence[Row]) -> Plan:
    """What was sent, as the plan it would have been: for the report."""
    sizes = drawn_sizes(options, target, VARIETY, options.seed)
    return Plan(
        np.array([row.scheduled_s for row in rows], dtype=np.float64),
        [sizes[index % VARIETY] for index in range(len(rows))],
        bodies_of(options, target, len(rows)),
        options.duration_s or DEFAULT_DURATION_S,
        None,
        None,
        described(options),
        (target.base_url,),
        notes=(warning(options),),
    )


def described(options: LoadOptions) -> str:
    """Where its requests come from, in words."""
    think = f", {options.think_s:g} s between answer and next request" if options.think_s else ""
    return f"closed loop of {options.closed_loop} clients{think}"


def warning(options: LoadOptions) -> str:
    """What the reader of its report must know."""
    return (
        f"closed loop of {options.closed_loop} clients: each waits for its answer before it sends again, so "
        "a slow target is sent less and the queueing that independent users would meet is hidden; these "
        "latencies are not those of an open load at the same rate"
    )

"""The open-loop client of the benchmarks of the whole: a process that sends and keeps a row for each request.

Before it: `whole_world` says what is sent where and when. After it: `Sent`. It is a process of its own, so
that starting replicas or watching them never delays a request. Times count from the start of the schedule; a
latency counts from the scheduled time, not from the sending. It must not judge.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from keystage.loadgen.monitor import Monitor, Watched
from keystage.loadgen.sender import Row, client, send_all
from keystage.loadgen.target import Target
from keystage.router.api import STATS_PATH, RouterStats

BODY_BYTES = 256
ANSWER_S = 300.0
QUEUE_S = 0.25
"""Between readings of a router's queues: the controller's tick."""
WARM_UP_REQUESTS = 10
WARM_UP_GAP_S = 0.5
"""Slower than any whole pipeline, so that no queue asks for replicas before the schedule begins."""
REFUSALS = (400, 404, 408, 413, 429, 500, 502, 503, 504)
"""Statuses with which a part of the platform names a reason; another one, or none, is a failure."""

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class RouterCount:
    """What a router counted between the first and the last request of a schedule.

    Attributes:
        accepted: requests it took.
        completed: those it answered whole.
        refused: those it refused, by reason.
        was_restarted: its counters began anew, so these numbers mean nothing.
    """

    accepted: int = 0
    completed: int = 0
    refused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    was_restarted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What became of one pipeline's requests, in schedule order.

    Attributes:
        scheduled_s: when each should be sent.
        sent_s: when it was.
        ended_s: when its answer was complete, or it failed.
        is_served: whether the whole answer came.
        refused: refusals by status and reason.
        failed: other failures by class: no answer, broken connection, time-out.
        queues: time-averaged waiting requests by stage, from time 0 to the last answer.
        router: what the router counted.
    """

    scheduled_s: Floats
    sent_s: Floats
    ended_s: Floats
    is_served: npt.NDArray[np.bool_]
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    queues: tuple[float, ...] = ()
    router: RouterCount = RouterCount()

    @property
    def latency_s(self) -> Floats:
        """Latencies of all, infinite for those that were not served."""
        return np.where(self.is_served, self.ended_s - self.scheduled_s, np.inf)

    @property
    def lag_s(self) -> Floats:
        """How much later than scheduled each was sent."""
        return self.sent_s - self.scheduled_s

    @property
    def unaccounted(self) -> int:
        """Requests that were neither served, refused with a reason, nor failed with one: must be 0."""
        told = sum(self.refused.values()) + sum(self.failed.values())
        return len(self.scheduled_s) - int(self.is_served.sum()) - told


def sent_of(rows: Sequence[Row], queues: tuple[float, ...] = (), router: RouterCount | None = None) -> Sent:
    """Rows of the sender as `Sent`."""
    refused: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row.is_served:
            continue
        if row.status in REFUSALS:
            refused[f"{row.status} {row.error.partition(': ')[2][:80]}".strip()] += 1
        else:
            failed[row.error_class] += 1
    return Sent(
        np.array([row.scheduled_s for row in rows]),
        np.array([row.sent_s for row in rows]),
        np.array([row.last_s for row in rows]),
        np.array([row.is_served for row in rows], dtype=np.bool_),
        dict(refused),
        dict(failed),
        queues,
        router or RouterCount(),
    )


def warm_up(urls: Sequence[str]) -> int:
    """Sends a few requests to each pipeline, slowly.

    Returns:
        How many were not served.
    """
    return uvloop.run(_warm_up(urls))


async def _warm_up(urls: Sequence[str]) -> int:
    times_s = [WARM_UP_GAP_S * i for i in range(WARM_UP_REQUESTS)]
    async with client(ANSWER_S) as session:
        bodies = [b"x" * BODY_BYTES] * len(times_s)
        found = await asyncio.gather(
            *(send_all(session, Target("raw", url), times_s, bodies) for url in urls)
        )
    return sum(not row.is_served for rows in found for row in rows)


def send(
    urls: Sequence[str], routers: Sequence[str], times_s: Sequence[Floats], start_s: float
) -> list[Sent]:
    """Sends every pipeline's schedule and waits for all answers; reads the routers' counters beside it.

    Args:
        urls: where requests of the pipelines go.
        routers: addresses of their routers.
        times_s: their schedules.
        start_s: `time.monotonic()` of time 0; one clock for all processes of a machine.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return uvloop.run(_send(urls, routers, times_s, start_s))


def _end_with_parent() -> None:
    """A benchmark that was killed leaves nobody who sends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


async def _send(
    urls: Sequence[str], routers: Sequence[str], times_s: Sequence[Floats], start_s: float
) -> list[Sent]:
    body = b"x" * BODY_BYTES
    async with client(ANSWER_S) as session:
        before = [await _stats(session, url) for url in routers]
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        monitors = [Monitor(Watched(f"{url}{STATS_PATH}"), start_s, QUEUE_S) for url in routers]
        polls = [asyncio.create_task(monitor.run()) for monitor in monitors]
        rows = await asyncio.gather(
            *(
                send_all(session, Target("raw", url), own.tolist(), [body] * len(own), start_s=start_s)
                for url, own in zip(urls, times_s, strict=True)
            )
        )
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        after = [await _stats(session, url) for url in routers]
    found = []
    for own, monitor, first, last in zip(rows, monitors, before, after, strict=True):
        queues = tuple(summary.queue_mean for summary in monitor.series.summaries())
        found.append(sent_of(own, queues, _router_of(first, last)))
    return found


async def _stats(session: aiohttp.ClientSession, url: str) -> RouterStats:
    async with session.get(url + STATS_PATH) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=RouterStats)


def _router_of(first: RouterStats, last: RouterStats) -> RouterCount:
    if first.incarnation != last.incarnation:
        return RouterCount(was_restarted=True)
    refused = {name: n - first.refused.get(name, 0) for name, n in last.refused.items()}
    return RouterCount(
        last.requests - first.requests,
        last.completed - first.completed,
        {name: n for name, n in refused.items() if n},
    )

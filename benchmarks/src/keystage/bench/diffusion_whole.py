"""Request-level batching live: in front of a `Serving` that runs each batch it is sent on a free device.

Before it: `diffusion_rival`, which decides. It stands in the bench's own process, with no way between client
and scheduler, and as many batches are out as there are devices. What a batch takes is measured first, on all
devices at once, through the same router, wire and workers that then serve.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from keystage.bench.diffusion_live import Serving
from keystage.bench.diffusion_rival import Rule, Waiting, WholeProfile, WholeQueue, whole_profile
from keystage.bench.frame import BenchError

MOST_MARGIN_RATIO = 0.05


class RequestLevel:
    """Forms batches of whole requests and sends each to a free device; an `Asking`.

    Args:
        up: what runs them.
        profile: of a batch.
        rule: how they are formed.
        devices: how many run at once.
        most: largest batch.
    """

    def __init__(self, up: Serving, profile: WholeProfile, rule: Rule, devices: int, most: int) -> None:
        self._up = up
        self._queue = WholeQueue(profile, rule, most)
        self._idle = devices
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[bytes, asyncio.Future[int]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._items = self._batches = 0

    async def ask(self, body: bytes, objective_s: float | None = None) -> tuple[int, float]:
        """See `Asking`."""
        sent_s, number = time.monotonic(), next(self._numbers)
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[number] = body, answered
        steps = int(msgspec.json.decode(body)["steps"])
        self._queue.add(Waiting(sent_s + (math.inf if objective_s is None else objective_s), number, steps))
        self._start()
        return await answered, time.monotonic() - sent_s

    async def batches(self) -> tuple[int, int]:
        """See `Asking`."""
        return self._items, self._batches

    def _start(self) -> None:
        """Batches onto free devices; who cannot be in time is refused."""
        now_s = time.monotonic()
        self._answer(self._queue.take_hopeless(now_s), HTTPStatus.GATEWAY_TIMEOUT)
        while self._idle:
            batch, given_up = self._queue.next_batch(now_s, self._idle)
            self._answer(given_up, HTTPStatus.GATEWAY_TIMEOUT)
            if not batch:
                return
            self._idle -= 1
            task = asyncio.create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch: Sequence[Waiting]) -> None:
        self._batches += 1
        self._items += len(batch)
        status = HTTPStatus.BAD_GATEWAY.value
        try:
            status, _ = await self._up.ask(together([self._asked[one.number][0] for one in batch]))
        finally:
            self._idle += 1
            self._answer(batch, status)
            self._start()

    def _answer(self, requests: Sequence[Waiting], status: int) -> None:
        for one in requests:
            _, answered = self._asked.pop(one.number)
            if not answered.done():
                answered.set_result(int(status))


def together(bodies: Sequence[bytes]) -> bytes:
    """The body of a batch of requests."""
    return b'{"requests":[' + b",".join(bodies) + b"]}"


async def measured(
    up: Serving,
    bodies: tuple[bytes, bytes],
    steps: tuple[int, int],
    devices: int,
    sizes: Sequence[int],
    rounds: int,
) -> tuple[WholeProfile, float]:
    """What batches take on all devices at once, and by how much longer than that others of their kind took.

    Args:
        up: what runs them.
        bodies: of a request of few and of many steps.
        steps: of both.
        devices: how many.
        sizes: batches that are measured, ascending; larger ones than the last are not run.
        rounds: how often each is measured.

    Returns:
        The profile, of the best of all rounds and devices (as for a request alone: what else the machine does
        is no part of a device), and the third quartile of (seconds / best - 1), at most `MOST_MARGIN_RATIO`.

    Raises:
        BenchError: a batch was not answered.
    """
    best: dict[int, tuple[float, float]] = {}
    over: list[float] = []
    for size in sizes:
        found = []
        await _timed(up, [bodies[0]] * size, devices)  # what is made once for a size of batch
        for body in bodies:
            times_s = [each for _ in range(rounds) for each in await _timed(up, [body] * size, devices)]
            found.append(min(times_s))
            over += [seconds / found[-1] - 1 for seconds in times_s]
        best[size] = found[0], found[1]
    return whole_profile(best, *steps), min(MOST_MARGIN_RATIO, statistics.quantiles(over, n=4)[2])


async def _timed(up: Serving, batch: Sequence[bytes], devices: int) -> list[float]:
    answers = await asyncio.gather(*(up.ask(together(batch)) for _ in range(devices)))
    if {status for status, _ in answers} != {200}:
        raise BenchError(f"batches of {len(batch)} were answered with {[status for status, _ in answers]}")
    return [seconds for _, seconds in answers]

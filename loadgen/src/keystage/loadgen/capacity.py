"""How fast the target is: unloaded latency (one at a time) and capacity (closed loop).

Runs before a replay whose rate is to be a share of the capacity. Closed loop on purpose: a fixed
number of clients each send their next request when the last one ended, which loads the target
fully without a queue that grows. Its latencies are not reported as the system's.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import aiohttp

from keystage.loadgen import closed_loop
from keystage.loadgen.sender import Row, send
from keystage.loadgen.target import Target


class TargetError(Exception):
    """The target answers nothing, so nothing can be measured: says what it answered instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Throughput with `concurrency` clients in a closed loop.

    Attributes:
        requests_per_s: completed in the window, divided by the window.
        output_tokens_per_s: tokens of those requests per second.
        concurrency: number of clients.
        completed: requests completed in the window.
        failed: requests that failed, in or after it.
        window_s: length of the window; it starts after a ramp-up of a quarter of the measurement.
        relative_error: 1 / sqrt(completed), about one standard error of the rate.
    """

    requests_per_s: float
    output_tokens_per_s: float
    concurrency: int
    completed: int
    failed: int
    window_s: float
    relative_error: float


async def unloaded(session: aiohttp.ClientSession, target: Target, bodies: Sequence[bytes]) -> list[Row]:
    """Sends the bodies one after another; the first only warms up and is left out.

    Raises:
        TargetError: if any fails, for unloaded latency must not be that of failures.
    """
    start_s = time.monotonic()
    rows = []
    for index, body in enumerate(bodies):
        row = Row(index, time.monotonic() - start_s)
        await send(session, target, row, body, start_s)
        if row.error:
            raise TargetError(
                f"{target.url} does not serve: request {index + 1} of {len(bodies)}: {row.error}"
            )
        rows.append(row)
    return rows[1:]


async def capacity(
    session: aiohttp.ClientSession,
    target: Target,
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    duration_s: float,
) -> Capacity:
    """Measures throughput; bodies are sent in turn, from the start again when used up.

    Requests in flight at the end are waited for, so that the target is idle afterwards, but do
    not count.

    Raises:
        TargetError: if nothing was completed in the window.
    """
    start_s = time.monotonic()

    async def ask(row: Row, body: bytes) -> None:
        await send(session, target, row, body, start_s)

    rows = await closed_loop.run(ask, bodies, clients=concurrency, duration_s=duration_s, start_s=start_s)
    return _throughput(rows, target, concurrency, duration_s / 4, duration_s)


def _throughput(
    rows: Sequence[Row], target: Target, concurrency: int, begin_s: float, end_s: float
) -> Capacity:
    done = [row for row in rows if row.is_served and begin_s <= row.last_s < end_s]
    failures = [row for row in rows if row.error]
    window_s = end_s - begin_s
    if not done:
        reason = failures[0].error if failures else "no answer came in time"
        raise TargetError(f"{target.url} completed nothing in {window_s:.1f} s of {len(rows)} sent: {reason}")
    return Capacity(
        requests_per_s=len(done) / window_s,
        output_tokens_per_s=sum(row.output_tokens for row in done) / window_s,
        concurrency=concurrency,
        completed=len(done),
        failed=len(failures),
        window_s=window_s,
        relative_error=1 / math.sqrt(len(done)),
    )

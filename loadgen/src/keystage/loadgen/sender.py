"""Sends requests from within the caller's own event loop (aiohttp): a request at a time, or a small schedule.

For callers that drive a session of their own, and for `capacity`; whole plans go through `sending`, which
keeps higher rates and finer times. Open loop too: one coroutine keeps the schedule, each request is a task
with as many connections as needed, there are no retries, and every failure is a row with its reason.

Times in rows are seconds since the start of the run on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from keystage.loadgen.sending.answers import ERROR_BYTES, read_tokens
from keystage.loadgen.sending.row import Progress, Row
from keystage.loadgen.sse import StreamTally
from keystage.loadgen.target import Target
from keystage.wire.descriptors import raise_descriptors

KEEP_ALIVE_S = 3.0
"""Idle connections are closed earlier than servers close them (uvicorn: 5 s), so that no request
is written to a connection that is about to be closed and counted as the server's failure."""

__all__ = ["KEEP_ALIVE_S", "Progress", "Row", "client", "send", "send_all"]


def client(timeout_s: float) -> aiohttp.ClientSession:
    """An HTTP client with unlimited connections (the soft limit of open files is raised too)."""
    raise_descriptors()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s),
        auto_decompress=False,
    )


async def send_all(
    session: aiohttp.ClientSession,
    target: Target,
    times_s: Sequence[float],
    bodies: Sequence[bytes],
    *,
    start_s: float | None = None,
    ended: Progress | None = None,
) -> list[Row]:
    """Sends every body at its time and waits for all answers.

    Args:
        session: HTTP client.
        target: what to call.
        times_s: seconds from the start, ascending, as many as bodies.
        bodies: request bodies.
        start_s: `time.monotonic()` at which the run starts; now, if None.
        ended: called with each row when its request has ended.

    Returns:
        One row per request, in schedule order.
    """
    start_s = time.monotonic() if start_s is None else start_s
    rows = [Row(i, float(at_s)) for i, at_s in enumerate(times_s)]
    async with asyncio.TaskGroup() as group:
        for row, body in zip(rows, bodies, strict=True):
            wait_s = start_s + row.scheduled_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(_send_then(session, target, row, body, start_s, ended))
    return rows


async def _send_then(
    session: aiohttp.ClientSession,
    target: Target,
    row: Row,
    body: bytes,
    start_s: float,
    ended: Progress | None,
) -> None:
    await send(session, target, row, body, start_s)
    if ended is not None:
        ended(row)


async def send(session: aiohttp.ClientSession, target: Target, row: Row, body: bytes, start_s: float) -> None:
    """Sends one request and fills its row; never raises for what network or server do."""
    row.sent_s = time.monotonic() - start_s
    try:
        async with session.post(
            target.url, data=body, headers=target.headers, allow_redirects=False
        ) as response:
            row.status = response.status
            if response.status != 200:
                detail = (await response.content.read(ERROR_BYTES)).decode(errors="replace")
                row.error = f"http_{response.status}: {detail}"
            elif target.is_streaming:
                await _read_stream(response, row, start_s)
            else:
                await _read_whole(response, target, row, start_s)
    except TimeoutError:
        row.error = "timeout: no complete answer in time"
    except aiohttp.ClientConnectorError as error:
        row.error = f"connect: {error}"
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
        row.error = f"disconnected: {error}"
    except (aiohttp.ClientError, OSError) as error:
        row.error = f"client_{type(error).__name__}: {error}"
    if row.error:
        row.last_s = time.monotonic() - start_s


async def _read_stream(response: aiohttp.ClientResponse, row: Row, start_s: float) -> None:
    tally = StreamTally()
    try:
        async for received in response.content.iter_any():
            tally.feed(received, time.monotonic() - start_s)
    finally:
        row.first_s = tally.first_s
        row.prompt_tokens = tally.prompt_tokens
        row.output_tokens = tally.output_tokens
    row.error = tally.verdict()
    row.last_s = time.monotonic() - start_s if tally.last_s is None else tally.last_s
    if row.first_s is None:
        row.first_s = row.last_s if row.is_served else None


async def _read_whole(response: aiohttp.ClientResponse, target: Target, row: Row, start_s: float) -> None:
    received = bytearray()
    async for part in response.content.iter_any():
        if row.first_s is None:
            row.first_s = time.monotonic() - start_s
        received += part
    row.last_s = time.monotonic() - start_s
    row.first_s = row.last_s if row.first_s is None else row.first_s
    if target.kind in ("raw", "bodies"):
        return
    read_tokens(received, row)

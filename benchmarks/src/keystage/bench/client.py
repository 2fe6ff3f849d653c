"""A small closed-loop client for benchmarks, in a process of its own so that its CPU is told apart.

It keeps a fixed number of requests in flight for a fixed time and reads every answer to its end.
Open-loop load is the load generator's business, not this module's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import resource
import time

import aiohttp
import msgspec
import uvloop

TIMEOUT_S = 60.0


class ClientError(Exception):
    """Not one request was answered; names the address and what came instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientReport:
    """What a client saw.

    Attributes:
        requests: answers with status 200, read to their end.
        failed: everything else.
        tokens: completion tokens by the answers' own usage (streams), else 0.
        elapsed_s: measured time.
        latencies_s: of the good answers.
        cpu_s: processor time of the client.
        last_error: what the last failed request met, empty for none.
    """

    requests: int
    failed: int
    tokens: int
    elapsed_s: float
    latencies_s: list[float]
    cpu_s: float
    last_error: str


def closed_loop(url: str, body: bytes, concurrency: int, duration_s: float) -> ClientReport:
    """Runs the client in a new process and waits for its report.

    Args:
        url: where to POST.
        body: JSON body.
        concurrency: requests in flight.
        duration_s: seconds; requests begun within it are finished.

    Raises:
        ClientError: nothing was answered with 200.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        report = pool.apply(_run, (url, body, concurrency, duration_s))
    if not report.requests:
        raise ClientError(f"{url}: none of {report.failed} requests was answered; last: {report.last_error}")
    return report


def _run(url: str, body: bytes, concurrency: int, duration_s: float) -> ClientReport:
    return uvloop.run(_client(url, body, concurrency, duration_s))


async def _client(url: str, body: bytes, concurrency: int, duration_s: float) -> ClientReport:
    latencies_s: list[float] = []
    tokens = failed = 0
    last_error = ""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=headers
    ) as session:
        end_s = time.perf_counter() + duration_s

        async def one() -> None:
            nonlocal tokens, failed, last_error
            while time.perf_counter() < end_s:
                started_s = time.perf_counter()
                try:
                    async with session.post(url, data=body) as answer:
                        tail = b""
                        async for chunk in answer.content.iter_any():
                            tail = (tail + chunk)[-2048:]
                        status = answer.status
                except (aiohttp.ClientError, TimeoutError) as error:
                    failed += 1
                    last_error = repr(error)
                    continue
                if status != 200:
                    failed += 1
                    last_error = f"status {status}: {tail[:200]!r}"
                    continue
                tokens += _usage(tail)
                latencies_s.append(time.perf_counter() - started_s)

        before = resource.getrusage(resource.RUSAGE_SELF)
        began_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(concurrency)))
        elapsed_s = time.perf_counter() - began_s
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ClientReport(len(latencies_s), failed, tokens, elapsed_s, latencies_s, cpu_s, last_error)


class _UsageCounts(msgspec.Struct):
    completion_tokens: int = 0


class _UsageEvent(msgspec.Struct):
    usage: _UsageCounts | None = None


def _usage(tail: bytes) -> int:
    """Completion tokens named by the last usage event of a stream, 0 when it names none."""
    for line in reversed(tail.split(b"\n")):
        if line.startswith(b"data: {") and b'"completion_tokens"' in line:
            usage = msgspec.json.decode(line[6:], type=_UsageEvent).usage
            return usage.completion_tokens if usage else 0
    return 0

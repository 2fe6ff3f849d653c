"""`keystage bench streams`: what thousands of slow streams cost in the gateway.

2,000 streaming answers at once through the gateway, one small chunk a second each, and 200 more
directly from the same function at the same time; then the same beside slow clients, which are sent
much and read nothing for seconds. Gateway, function and client are a process each; every chunk is
numbered and stamped. Each round has a gateway of its own, so that memory counts from the same start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from keystage.bench import streams_client
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.streams_client import Group, GroupReport
from keystage.bench.streams_upstream import Schedule
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

NAME = "streams"
CHUNK_BYTES = 64
SLOW = Schedule(count=100, every_s=0.1, size_bytes=1 << 16)
SAMPLE_S = 0.25
TAIL_SPREAD_RATIO = 2.0
"""p99 of a handful of milliseconds on two shared cores: one other process's time slice moves it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        rounds: each with a fresh gateway.
        streams: at once through the gateway.
        direct: at the same time directly.
        chunks: per stream, one a second.
        short: the same in the phase with slow clients.
        slow: slow clients.
        ramp_s: seconds over which streams are opened.
    """

    rounds: int
    streams: int
    direct: int
    chunks: int
    short: int
    slow: int
    ramp_s: float


FULL = Size(rounds=3, streams=2000, direct=200, chunks=60, short=20, slow=50, ramp_s=4.0)
QUICK = Size(rounds=2, streams=200, direct=100, chunks=5, short=5, slow=5, ramp_s=1.0)


@dataclasses.dataclass(slots=True)
class _Round:
    """One round's phases, and what the gateway used in the first."""

    through: GroupReport
    direct: GroupReport
    beside: GroupReport
    direct_beside: GroupReport
    slow: GroupReport
    memory_bytes: int
    cpu_s: float


def run(*, quick: bool = False) -> BenchResult:
    """Measures memory per stream, added latency, and what slow clients do to fast ones.

    Args:
        quick: a tenth of the streams, and short ones.

    Raises:
        BenchError: this machine allows too few descriptors, or a stream fails.
    """
    size = QUICK if quick else FULL
    rounds = [asyncio.run(_round(size)) for _ in range(size.rounds)]
    return _result(size, rounds)


async def _round(size: Size) -> _Round:
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder:
        command = f"{shlex.quote(sys.executable)} -m keystage.bench.streams_upstream $PORT"
        async with LocalWorld(Path(folder) / "home", controller=False, keysmanager=False) as world:
            await world.deploy(Deployment(service=NAME, envProcess=command))
            (replica,) = await world.wait_ready(NAME)
            assert world.gateway is not None
            assert world.gateway.process is not None
            gateway = psutil.Process(world.gateway.process.pid)
            return await asyncio.to_thread(
                _phases, size, _address(world.gateway_url.removeprefix("http://")),
                _address(replica.address), gateway,
            )  # fmt: skip


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _phases(
    size: Size, gateway_at: tuple[str, int], function_at: tuple[str, int], gateway: psutil.Process
) -> _Round:
    prefix = f"/function/{NAME}"
    long, short = (Schedule(count, 1.0, CHUNK_BYTES) for count in (size.chunks, size.short))
    through = Group("through", gateway_at, prefix, size.streams, long)
    direct = Group("direct", function_at, "", size.direct, long)
    beside = Group("beside", gateway_at, prefix, size.streams, short)
    direct_beside = Group("direct beside", function_at, "", size.direct, short)
    # They read on when the fast ones have ended: fetching all that was held back is no slowness.
    slow = Group("slow", gateway_at, prefix, size.slow, SLOW, size.short + size.ramp_s)
    warm = Group("warm", gateway_at, prefix, 10, Schedule(3, 0.1, CHUNK_BYTES))
    _measure([warm], 0.1, gateway)
    before = gateway.memory_info().rss
    began = gateway.cpu_times()
    first, most = _measure([through, direct], size.ramp_s, gateway)
    ended = gateway.cpu_times()
    second, _ = _measure([beside, direct_beside, slow], size.ramp_s, gateway)
    return _Round(
        through=first["through"],
        direct=first["direct"],
        beside=second["beside"],
        direct_beside=second["direct beside"],
        slow=second["slow"],
        memory_bytes=most - before,
        cpu_s=ended.user + ended.system - began.user - began.system,
    )


def _measure(
    groups: list[Group], ramp_s: float, gateway: psutil.Process
) -> tuple[dict[str, GroupReport], int]:
    """Reports of the groups, and the gateway's largest resident size meanwhile."""
    most = 0
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        asked = pool.apply_async(streams_client.run, (groups, ramp_s))
        while not asked.ready():
            most = max(most, gateway.memory_info().rss)
            asked.wait(SAMPLE_S)
        try:
            reports = asked.get()
        except OSError as error:
            raise BenchError(str(error)) from error
    for name, report in reports.items():
        if report.failed:
            raise BenchError(f"{name}: {len(report.failed)} streams failed, the first: {report.failed[0]}")
    return reports, most


def _result(size: Size, rounds: list[_Round]) -> BenchResult:
    rows = [
        _row("gateway", size.streams, [r.through for r in rounds]),
        _row("direct", size.direct, [r.direct for r in rounds]),
        _row("gateway, slow clients beside", size.streams, [r.beside for r in rounds]),
        _row("direct, slow clients beside", size.direct, [r.direct_beside for r in rounds]),
    ]
    everything = [
        report for r in rounds for report in (r.through, r.direct, r.beside, r.direct_beside, r.slow)
    ]
    figures = {
        "memory_per_stream_bytes": Figure(
            [r.memory_bytes / size.streams for r in rounds],
            "growth of the gateway's resident memory / streams",
        ),
        "added_ms_p50": Figure(
            [_added_ms(r.through, r.direct, 50) for r in rounds],
            "p50 per chunk, through the gateway less direct",
        ),
        "added_ms_p99": Figure(
            [_added_ms(r.through, r.direct, 99) for r in rounds],
            "p99 per chunk, through the gateway less direct",
            max_spread_ratio=TAIL_SPREAD_RATIO,
        ),
        "beside_slow_p99_ratio": Figure(
            [_ms(r.beside, 99) / _ms(r.direct_beside, 99) for r in rounds],
            "p99 of fast clients beside slow ones: through the gateway / direct",
            max_spread_ratio=TAIL_SPREAD_RATIO,
        ),
        "lost_chunks": Figure([float(sum(r.missing for r in everything))], "in all phases", "0"),
        "misplaced_chunks": Figure([float(sum(r.misplaced for r in everything))], "in all phases", "0"),
    }
    cpu_us = [1e6 * r.cpu_s / r.through.chunks for r in rounds]
    slow_mb = SLOW.count * SLOW.size_bytes / 1e6
    chunks = sum(r.chunks for r in everything)
    load = (
        f"{size.streams} streams through the gateway and {size.direct} direct ones at once, opened over "
        f"{size.ramp_s:g} s, {CHUNK_BYTES} bytes a second each for {size.chunks} s ({size.short} s beside "
        f"slow clients); {chunks} chunks in all"
    )
    slow = (
        f"slow clients: {size.slow} beside the fast ones, each sent {slow_mb:.1f} MB at "
        f"{SLOW.size_bytes / SLOW.every_s / 1e6:.2f} MB/s, reading nothing until the fast ones have ended; "
        "each then got every chunk in order"
    )
    notes = [
        load,
        "latency: from the function's write to the client's read, one clock; connection and head included",
        slow,
        f"CPU of the gateway per chunk: {np.median(cpu_us):.0f} us, opening the streams included",
        "memory: what the kernel holds for sockets is not in it",
    ]
    return BenchResult(rows, figures, notes)


def _ms(report: GroupReport, percentile: float) -> float:
    return 1e3 * float(np.percentile(report.latencies_s, percentile))


def _added_ms(through: GroupReport, direct: GroupReport, percentile: float) -> float:
    return _ms(through, percentile) - _ms(direct, percentile)


def _row(name: str, streams: int, reports: list[GroupReport]) -> dict[str, object]:
    latencies_ms = 1e3 * np.concatenate([report.latencies_s for report in reports])
    return {
        "way": name,
        "streams": streams,
        "chunks": sum(report.chunks for report in reports),
        "p50_ms": float(np.percentile(latencies_ms, 50)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
        "max_ms": float(latencies_ms.max()),
        "missing": sum(report.missing for report in reports),
        "misplaced": sum(report.misplaced for report in reports),
    }

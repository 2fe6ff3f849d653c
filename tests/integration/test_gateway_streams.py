"""Streaming answers through the gateway: none lost or reordered, and back-pressure from end to end."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from support.local_function import PYTHON, authorization, function

from keystage.bench import streams_client
from keystage.bench.streams_client import Group, GroupReport
from keystage.bench.streams_upstream import STAMP_BYTES, Schedule, stamp
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld

Work = Callable[[LocalWorld], Awaitable[None]]
SILENT_S = 4.0
BIG = Schedule(count=2500, every_s=0.001, size_bytes=1 << 16)
PIECES = 4000
"""Of 64 KiB: three times what the buffers of two connections hold where a system lets them grow to 37 MiB."""


def run(tmp_path: Path, deployment: Deployment, work: Work) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(60),
            LocalWorld(tmp_path / "state", gateway_port=0, controller=False) as world,
        ):
            await world.deploy(deployment)
            await world.wait_ready(deployment.service)
            await work(world)

    asyncio.run(inside())


def streams() -> Deployment:
    return Deployment(service="streams", envProcess=f"{PYTHON} -m keystage.bench.streams_upstream $PORT")


def clients(groups: list[Group]) -> dict[str, GroupReport]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(streams_client.run, (groups, 1.0))


@pytest.mark.slow
def test_two_hundred_streams_lose_nothing_and_do_not_wait_for_slow_clients(tmp_path: Path) -> None:
    async def work(world: LocalWorld) -> None:
        host, _, port = world.gateway_url.removeprefix("http://").rpartition(":")
        at, prefix = (host, int(port)), "/function/streams"
        fast = Group("fast", at, prefix, 200, Schedule(count=12, every_s=0.25, size_bytes=64))
        slow = Group("slow", at, prefix, 10, Schedule(100, 0.01, 1 << 16), SILENT_S)
        reports = await asyncio.to_thread(clients, [fast, slow])
        for group in (fast, slow):
            report = reports[group.name]
            assert report.failed == []
            assert (report.chunks, report.missing, report.misplaced) == (
                group.streams * group.schedule.count, 0, 0,
            )  # fmt: skip
        # Whoever waited for a slow client would have waited until that read on.
        assert reports["fast"].latencies_s.max() < SILENT_S / 2
        assert reports["slow"].latencies_s.max() > SILENT_S / 2

    run(tmp_path, streams(), work)


@pytest.mark.slow
def test_client_that_reads_nothing_stops_the_function_and_then_gets_everything(tmp_path: Path) -> None:
    async def work(world: LocalWorld) -> None:
        async with (
            aiohttp.ClientSession(world.gateway_url, read_bufsize=1 << 14) as session,
            session.get("/function/streams" + BIG.target) as answer,
        ):
            await asyncio.sleep(3.0)  # longer than all of it would take
            read_on_ns = time.monotonic_ns()
            chunks = [await answer.content.readexactly(BIG.size_bytes) for _ in range(BIG.count)]
            assert await answer.content.read() == b""
        stamps = [stamp(chunk[:STAMP_BYTES]) for chunk in chunks]
        assert [number for number, _ in stamps] == list(range(BIG.count))
        before = sum(at_ns < read_on_ns for _, at_ns in stamps)
        assert 0 < before < BIG.count / 2, "of 160 MB, most waits in the function, however buffers grow"

    run(tmp_path, streams(), work)


@pytest.mark.slow
def test_function_that_reads_nothing_stops_the_client_and_its_early_answer_arrives(tmp_path: Path) -> None:
    async def work(world: LocalWorld) -> None:
        taken = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal taken
            for _ in range(PIECES):
                yield bytes(1 << 16)
                taken += 1

        async with aiohttp.ClientSession(
            world.gateway_url, headers=authorization(*world.credentials)
        ) as session:
            async with session.post("/function/echo/slow?s=2", data=body()) as answer:
                assert answer.status == 200
                assert await answer.text() == "echo-0"
            assert 0 < taken < PIECES / 2, f"of {PIECES} pieces of 64 KiB, most wait at the client"

    run(tmp_path, function(), work)


@pytest.mark.slow
def test_client_that_never_reads_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTAGE_TIMEOUT_S", "1")
    ended = 'gateway_function_invocation_total{code="499",function_name="streams.openfaas-fn"} 1.0'

    async def work(world: LocalWorld) -> None:
        host, _, port = world.gateway_url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        writer.write(f"GET /function/streams{BIG.target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with aiohttp.ClientSession(world.gateway_url) as session:
            while ended not in (await (await session.get("/metrics")).text()):
                await asyncio.sleep(0.1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(BIG.count * BIG.size_bytes)
        writer.close()

    run(tmp_path, streams(), work)

"""Workers that live and do not do their part: one stands still and comes back, one is slow beside others."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.pipeline_world import Served, Stream, served, until

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.router.api import ReplicaStats
from keystage.router.fleet import DEAD_AFTER_S
from keystage.worker.executor import emulated_token

STREAMS = 6
NEW_TOKENS = 400


def looping(folder: Path, stages: int) -> Path:
    folder.mkdir()
    write(folder, emulated("em", stages, execution="looping"))
    return folder


async def check_tokens(pipeline: Served, streams: list[Stream]) -> None:
    """Every stream has the tokens that the emulated model makes of its session, each once."""
    await until(lambda: len(pipeline.log("queued")) >= len(streams), "the requests in the log")
    numbers = {line["prompt"]: line["session"] for line in pipeline.log("queued")}
    for i, stream in enumerate(streams):
        assert stream.error is None
        prompt, wanted = 3 + i, NEW_TOKENS
        expected = [emulated_token(numbers[prompt], prompt + k, 256) for k in range(wanted)]
        assert stream.tokens == expected


async def replicas(pipeline: Served, stage: int) -> dict[str, ReplicaStats]:
    return {r.replica: r for r in (await pipeline.stats()).replicas if stage in r.stages}


@pytest.mark.slow
def test_a_worker_that_stands_still_is_left_and_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        bundle = looping(tmp_path / "bundle", 2)
        device = "emulated:beta=0.01"
        async with served(bundle, tmp_path / "home", device=device, replicas=[1, 2], slots=8) as pipeline:
            await pipeline.world.wait_ready("em-stage-1", 2)
            streams = [Stream() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(
                    pipeline.stream(stream, range(3 + i), max_tokens=NEW_TOKENS, temperature=0)
                )
                for i, stream in enumerate(streams)
            ]
            await until(lambda: all(len(stream.tokens) > 5 for stream in streams), "tokens of every stream")
            held = {name: r.held_slots for name, r in (await replicas(pipeline, 1)).items()}
            assert sorted(held.values()) == [3, 3]
            victim = next(r for r in pipeline.world.replicas("em-stage-1") if r.state == "ready")
            os.kill(victim.pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            try:
                await until(lambda: bool(pipeline.log("lost")), "the hung worker is given up", 30.0)
                assert time.monotonic() - stopped_s < DEAD_AFTER_S + 5.0
                [gone] = pipeline.log("lost")
                assert (gone["replica"], gone["why"], gone["ending"]) == (
                    victim.replica, "silent", "no sign of life",
                )  # fmt: skip
                before = [len(stream.tokens) for stream in streams]
                await until(
                    lambda: all(len(s.tokens) > n for s, n in zip(streams, before, strict=True)), "all go on"
                )
            finally:
                os.kill(victim.pid, signal.SIGCONT)

            def is_back() -> bool:
                mine = (line for line in pipeline.log("ready", "em-0") if line["replica"] == victim.replica)
                return any(line["t"] > gone["t"] for line in mine)

            await until(is_back, "it is ready again")
            await asyncio.gather(*tasks)
            await check_tokens(pipeline, streams)
            stats = await pipeline.stats()
            assert (stats.refused, stats.convicted, stats.set_apart) == ({}, 0, 0)
            # It is the same process, it is given work again, and holds nothing of before.
            again = [Stream() for _ in range(4)]
            await asyncio.gather(
                *(
                    pipeline.stream(s, [1] * (50 + i), max_tokens=20, temperature=0)
                    for i, s in enumerate(again)
                )
            )
            assert [len(stream.tokens) for stream in again] == [20] * 4
            now = (await replicas(pipeline, 1))[victim.replica]
            assert (now.state, now.held_slots) == ("ready", 0)
            assert now.rows[0] > 0
            assert victim.pid == next(
                r.pid for r in pipeline.world.replicas("em-stage-1") if r.replica == victim.replica
            )

    asyncio.run(run())


@pytest.mark.slow
def test_a_slow_replica_rests_and_its_sessions_move(tmp_path: Path) -> None:
    async def run() -> None:
        bundle = looping(tmp_path / "bundle", 1)
        async with served(
            bundle, tmp_path / "home", device="emulated:beta=0.01", replicas=[3], slots=8
        ) as pipeline:
            await pipeline.world.wait_ready("em-stage-0", 3)
            streams = [Stream() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(pipeline.stream(stream, range(3 + i), max_tokens=3000, temperature=0))
                for i, stream in enumerate(streams)
            ]
            await until(lambda: all(len(stream.tokens) > 5 for stream in streams), "tokens of every stream")
            victim = pipeline.world.replicas("em-stage-0")[0]
            # Slowed down from outside: it stands still most of the time, and never for long.
            end_s = time.monotonic() + 60.0
            while not pipeline.log("rests"):
                assert time.monotonic() < end_s, "it never rested"
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(0.25)
                os.kill(victim.pid, signal.SIGCONT)
                await asyncio.sleep(0.01)
            [rests] = pipeline.log("rests")
            assert rests["replica"] == victim.replica
            assert "the bound is 3" in rests["why"]
            found = (await replicas(pipeline, 0))[victim.replica]
            assert (found.resting, found.state) == (True, "ready")

            async def left() -> bool:
                return (await replicas(pipeline, 0))[victim.replica].held_slots == 0

            while not await left():
                assert time.monotonic() < end_s, "its sessions never moved"
                await asyncio.sleep(0.05)
            stats = await pipeline.stats()
            assert (stats.rested, stats.refused) == (1, {})
            assert stats.moves >= 2
            before = [len(stream.tokens) for stream in streams]
            await until(
                lambda: all(len(s.tokens) > n for s, n in zip(streams, before, strict=True)), "all go on"
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())

"""Death and drain of a middle stage's worker in mid-generation: nothing lost, nothing repeated.

Eight streams run over four real stages; the disturbed run must give the very tokens of the
undisturbed one, greedy and sampled (temperature 0.8, seeds).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_world import Served, Stream, served, until

STREAMS = 8
NEW_TOKENS = 32
LONG_TOKENS = 80
"""A second replica starts in the meantime, and 20 tokens must be left when it is ready."""
PROMPTS = [[504, 2923, 282, 4649, 314, 100 + i, 200 + 3 * i] + [300 + i] * (3 * i) for i in range(STREAMS)]
MIDDLE = "smollm2-stage-1"


def _sampling(kind: str, index: int) -> dict[str, Any]:
    if kind == "greedy":
        return {"temperature": 0}
    return {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + index}


def _begin(pipeline: Served, kind: str, new_tokens: int) -> tuple[list[Stream], asyncio.Future[Any]]:
    streams = [Stream() for _ in range(STREAMS)]
    everything = asyncio.gather(
        *(
            pipeline.stream(stream, PROMPTS[i], max_tokens=new_tokens, **_sampling(kind, i))
            for i, stream in enumerate(streams)
        )
    )
    return streams, everything


async def _undisturbed(pipeline: Served, kind: str, new_tokens: int) -> list[list[int]]:
    streams, everything = _begin(pipeline, kind, new_tokens)
    await everything
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert (await pipeline.stats()).replayed_tokens == 0
    return [stream.tokens for stream in streams]


def _check(streams: list[Stream], expected: list[list[int]]) -> None:
    for stream, tokens in zip(streams, expected, strict=True):
        assert stream.error is None
        assert stream.finish_reason == "length"
        assert stream.tokens == tokens  # equal means: without gap, without repeat


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_killed_worker(smollm2_bundle: Path, tmp_path: Path, kind: str) -> None:
    async def run() -> None:
        async with served(smollm2_bundle, tmp_path) as pipeline:
            expected = await _undisturbed(pipeline, kind, NEW_TOKENS)
            streams, everything = _begin(pipeline, kind, NEW_TOKENS)
            await until(lambda: all(len(s.tokens) >= 5 for s in streams), "five tokens each")
            assert all(len(stream.tokens) <= NEW_TOKENS - 8 for stream in streams)
            (victim,) = pipeline.world.replicas(MIDDLE)
            os.kill(victim.pid, signal.SIGKILL)
            await everything
            _check(streams, expected)
            stats = await pipeline.stats()
            assert stats.replayed_tokens > 0
            assert stats.completed == 2 * STREAMS
            pause_s = max(stream.longest_pause_s for stream in streams)
            print(f"{kind}: {stats.replayed_tokens} tokens replayed, longest pause {pause_s:.2f} s")

    asyncio.run(run())


@pytest.mark.slow
def test_move_of_all_sessions_to_another_replica(smollm2_bundle: Path, tmp_path: Path) -> None:
    kind = "sampled"

    async def run() -> None:
        async with served(smollm2_bundle, tmp_path) as pipeline:
            expected = await _undisturbed(pipeline, kind, LONG_TOKENS)
            (old,) = pipeline.world.replicas(MIDDLE)
            streams, everything = _begin(pipeline, kind, LONG_TOKENS)
            await until(lambda: all(len(s.tokens) >= 5 for s in streams), "five tokens each")
            # The old replica drains, and keeps serving until the new one is ready; then all move.
            await pipeline.world.scale(MIDDLE, 2)
            os.kill(old.pid, signal.SIGTERM)
            await everything
            _check(streams, expected)
            stats = await pipeline.stats()

            def moved() -> set[int]:
                moves = pipeline.log("move", "smollm2-0")
                return {session for move in moves for session in move["sessions"]}

            await until(lambda: len(moved()) == STREAMS, "every session is logged to have moved")
            moves = pipeline.log("move", "smollm2-0")
            lengths = [tokens for move in moves for tokens in move["tokens"]]
            limits = [len(prompt) + LONG_TOKENS - 20 for prompt in PROMPTS]
            assert max(lengths) <= max(limits), "the new replica came too late for this test to mean much"
            assert stats.moves >= STREAMS
            assert stats.replayed_tokens > 0
            pause_s = max(stream.longest_pause_s for stream in streams)
            print(
                f"{kind}: {stats.moves} moves, {stats.replayed_tokens} tokens replayed, {pause_s:.2f} s pause"
            )

    asyncio.run(run())


def test_disconnect_frees_every_stage(smollm2_bundle: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with served(smollm2_bundle, tmp_path) as pipeline:
            stream = Stream()
            task = asyncio.create_task(pipeline.stream(stream, PROMPTS[0], max_tokens=2000, temperature=0))
            await until(lambda: len(stream.tokens) >= 3, "three tokens")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(500):
                stats = await pipeline.stats()
                if not any(replica.held_slots for replica in stats.replicas):
                    break
                await asyncio.sleep(0.02)
            assert [replica.held_slots for replica in stats.replicas] == [0, 0, 0, 0]
            again = Stream()
            await pipeline.stream(again, PROMPTS[1], max_tokens=4, temperature=0)
            assert len(again.tokens) == 4

    asyncio.run(run())

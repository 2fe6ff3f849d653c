"""Too few KV blocks for the sessions there are: real router node and worker engines, drawn interleavings.

Whoever owns the paths, whatever dies or is cancelled: every request ends once with exactly its tokens,
no row runs without its blocks (`CheckedExecutor`), and at rest every block is back. A seed is one
interleaving.
"""

from __future__ import annotations

import random

import pytest
from support.simulated_net import SimulatedPipeline

CALM = {"submit": 0.7, "cancel": 0.2, "beat": 0.1}
WILD = {"submit": 0.45, "cancel": 0.12, "join": 0.1, "kill": 0.08, "notice": 0.1, "drain": 0.07, "beat": 0.08}

MOVING = {
    "submit": 0.35,
    "cancel": 0.05,
    "join": 0.25,
    "drain": 0.2,
    "kill": 0.02,
    "notice": 0.05,
    "beat": 0.08,
}


def pipeline_of(rng: random.Random, stages: int, blocks: int) -> SimulatedPipeline:
    return SimulatedPipeline(
        rng,
        "looping",
        stages,
        slots=8,
        kv_blocks=blocks,
        ring_bytes=rng.choice((64 * 48, 1 << 16)),
        waves=rng.choice((1, 2, 3)),
    )


def live(seed: int, kinds: dict[str, float], events: int) -> None:
    rng = random.Random(seed)
    pipeline = pipeline_of(rng, rng.randint(1, 3), rng.choice((12, 20)))
    if len(pipeline.pipeline.stages) == 3 and rng.random() < 0.5:
        pipeline.add_worker((0, 2))  # a path may leave it and come back
    try:
        pipeline.live(
            events, lambda: pipeline.submit(rng.choice((1, 7, 40)), rng.choice((3, 60, 150))), kinds
        )
        pipeline.check_at_rest()
        pipeline.check_tokens()
    finally:
        pipeline.close()


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    live(seed, CALM, 16)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_so_it_is_when_workers_come_and_go(seed: int) -> None:
    live(seed, WILD, 24)


@pytest.mark.parametrize("seed", range(2000, 2030))
def test_so_it_is_when_sessions_are_moved_all_the_time(seed: int) -> None:
    live(seed, MOVING, 40)


@pytest.mark.parametrize("seed", [*range(3000, 3020), 10077])
def test_so_it_is_when_the_router_is_replaced(seed: int) -> None:
    live(seed, {**WILD, "restart": 0.04}, 24)


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_owners_that_share_a_stage_do_not_starve_each_other(seed: int, waves: int) -> None:
    rng = random.Random(seed)
    pipeline = pipeline_of(rng, 2, 12)
    pipeline.waves = waves
    owners = [pipeline.add_worker((0,)) for _ in range(3)]
    pipeline.add_worker((1,))
    try:
        while pipeline.step():
            pass
        for _ in range(9):
            pipeline.submit(rng.choice((1, 20)), 150)
        pipeline.settle(60_000)
        pipeline.check_at_rest()
        pipeline.check_tokens()
        preempted = [pipeline.engines[owner]._looping.preemptions for owner in owners]
        assert sum(preempted) > 0
    finally:
        pipeline.close()

"""Random lives of a looping pipeline: real router node and worker engines, drawn interleavings.

Whatever dies, drains, joins or is cancelled: every request ends once, with exactly its tokens, and
at rest nobody holds anything. Each seed is one interleaving and can be run alone.
"""

from __future__ import annotations

import random

import pytest
from support.simulated_net import SimulatedPipeline

KINDS = {"submit": 0.45, "cancel": 0.1, "join": 0.1, "kill": 0.1, "notice": 0.1, "drain": 0.08, "beat": 0.07}


def live(seed: int, kinds: dict[str, float]) -> None:
    rng = random.Random(seed)
    pipeline = SimulatedPipeline(
        rng,
        "looping",
        rng.randint(1, 4),
        slots=rng.choice((1, 2, 6)),
        kv_blocks=rng.choice((4, 12, 1 << 12)),
        ring_bytes=rng.choice((64 * 16, 64 * 48, 1 << 16)),
        waves=rng.choice((1, 2, 4)),
    )
    try:
        pipeline.live(40, lambda: pipeline.submit(rng.choice((1, 2, 7, 40)), rng.choice((1, 2, 9))), kinds)
        pipeline.check_at_rest()
        pipeline.check_tokens()
    finally:
        pipeline.close()


@pytest.mark.parametrize("seed", range(240))
def test_every_request_ends_once_with_its_tokens(seed: int) -> None:
    live(seed, KINDS)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_living_worker_taken_for_dead_does_no_harm(seed: int) -> None:
    live(seed, {**KINDS, "lose sight": 0.08})


@pytest.mark.parametrize("seed", range(2000, 2100))
def test_a_restarted_router_finds_empty_workers(seed: int) -> None:
    live(seed, {**KINDS, "restart": 0.06})

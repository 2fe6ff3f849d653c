"""Random lives of a single-pass pipeline: real router node and worker engines, drawn interleavings.

Every item is answered once with the right bytes or was cancelled; at rest no output is parked, no
ring slot is taken and no credit is held.
"""

from __future__ import annotations

import random

import pytest
from support.simulated_net import SimulatedPipeline

KINDS = {"submit": 0.5, "cancel": 0.1, "join": 0.1, "kill": 0.1, "notice": 0.1, "drain": 0.05, "beat": 0.05}


def live(seed: int, kinds: dict[str, float]) -> None:
    rng = random.Random(seed)
    ring_bytes = rng.choice((64 * 2, 64 * 8, 1 << 16))
    pipeline = SimulatedPipeline(
        rng,
        "single-pass",
        rng.randint(1, 4),
        slots=rng.choice((1, 2, 8)),
        ring_bytes=ring_bytes,
    )
    try:
        pipeline.live(
            50,
            lambda: pipeline.submit_item(rng.randbytes(rng.randint(1, 100))),
            kinds,
        )
        pipeline.check_at_rest()
        pipeline.check_answers()
    finally:
        pipeline.close()


@pytest.mark.parametrize("seed", range(200))
def test_every_item_is_answered_once(seed: int) -> None:
    live(seed, KINDS)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_living_worker_taken_for_dead_does_no_harm(seed: int) -> None:
    live(seed, {**KINDS, "lose sight": 0.08})


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_a_restarted_router_finds_empty_workers(seed: int) -> None:
    live(seed, {**KINDS, "restart": 0.06})

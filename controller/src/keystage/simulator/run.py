"""One run of a world under a steering: observe, steer, apply, at every tick.

Before it: a world, and who steers it. After it: an `Outcome`. The steering meets the platform every real
controller meets; it is called first at time 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from keystage.controller.domain.steering import Steering
from keystage.simulator.api import Outcome, World
from keystage.simulator.platform import SimulatedPlatform


def simulate(
    world: World,
    steering: Steering | None,
    seed: int,
    *,
    log: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Runs a world until all requests are served, at the latest until `limit_s`.

    A world without requests runs for `duration_s`. A steering that starves a stage for good runs into
    `limit_s`, so worlds for comparisons should state one.

    Args:
        world: the world.
        steering: who decides; None: nobody, the replicas of the start stay.
        seed: of every draw; the same seed gives the same run, byte for byte.
        log: event log to write.
        progress: told the simulated time after every tick.

    Raises:
        WorldError: the world cannot be.
    """
    began_s = time.perf_counter()
    platform = SimulatedPlatform(world, seed, log=log)
    end_s = world.limit_s if platform.has_traffic else min(world.duration_s, world.limit_s)
    ticks = 0
    while platform.now_s < end_s and not platform.is_served:
        if steering is not None:
            platform.apply(steering.steer(platform.observe()))
        ticks += 1
        idle = steering is None and progress is None
        platform.advance(end_s if idle else min(end_s, ticks * world.tick_s))
        if progress is not None:
            progress(platform.now_s)
        if steering is None and platform.is_stuck:
            break
    digest = platform.close()
    return platform.outcome(time.perf_counter() - began_s, digest)

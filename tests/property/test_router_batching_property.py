"""Random lives of a single-pass pipeline under every batching: workers come and die, clients go.

Whatever happens, every item is answered or refused for its lateness, and at rest nothing is held.
"""

from __future__ import annotations

import contextlib
import math
import random

import pytest
from support.emulated_items import EmulatedItems

from keystage.batching.choice import parse_batching, parse_late
from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import DeadlineUnreachable, TooLate

CHOICES = ("eager", "deferred", "timeout:0", "timeout:25", "partial-slo")


class Life:
    """A pipeline, what may happen to it, and who asked for what."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        stages = [(rng.uniform(0, 0.004), rng.uniform(0.001, 0.03)) for _ in range(rng.randint(1, 3))]
        batching, late = parse_batching(rng.choice(CHOICES)), parse_late(rng.choice(("demote", "refuse")))
        settings = BatchSettings(batching, late, rng.choice((None, 0.05, 0.3)))
        self.stages = len(stages)
        self.world = EmulatedItems(
            stages, settings, is_profiled=rng.random() < 0.5, hop_s=rng.choice((0.0, 0.0005, 0.004))
        )
        self.submitted: list[int] = []
        self.cancelled: set[int] = set()
        self._names = 0

    def join(self) -> None:
        first = self.rng.randrange(self.stages)
        stages = tuple(range(first, self.rng.randint(first, self.stages - 1) + 1))
        most = self.rng.choice((1, 4, 16))
        self.add(stages, most=most, slots=self.rng.choice((0, 1, most)))

    def add(self, stages: tuple[int, ...], *, most: int = 64, slots: int = 0) -> None:
        self._names += 1
        self.world.add_worker(f"w{self._names}", stages, most=most, slots=slots)

    def kill(self) -> None:
        alive = sorted(self.world.fleet.workers)
        if alive:
            self.world.kill_worker(self.rng.choice(alive))

    def drain(self) -> None:
        ready = [name for name, worker in self.world.fleet.workers.items() if worker.is_ready]
        if ready:
            self.world.fleet.draining(ready[0])
            self.world.core.worker_draining(ready[0], self.world.now_s)

    def cancel(self) -> None:
        if self.submitted:
            number = self.rng.choice(self.submitted)
            self.cancelled.add(number)
            self.world.cancel(number)

    def submit(self) -> None:
        with contextlib.suppress(DeadlineUnreachable):
            self.submitted.append(self.world.submit(self.rng.choice((None, None, 0.02, 0.2, 5.0))))

    def tick(self) -> None:
        self.world.core.tick(self.world.now_s)

    def live(self, events: int) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.join()
        kinds = [self.submit] * 12 + [self.cancel, self.join, self.kill, self.drain, self.tick]
        at_s = 0.0
        for _ in range(events):
            at_s += self.rng.expovariate(self.rng.choice((20.0, 2000.0)))
            self.world.at(at_s, self.rng.choice(kinds))
        self.world.run(until_s=at_s)
        # Whatever happened, there is a way to serve again.
        for stage in range(self.stages):
            self.add((stage,))
        self.world.run()
        self.tick()
        self.world.run()


@pytest.mark.parametrize("seed", range(80))
def test_every_item_ends_and_nothing_is_left(seed: int) -> None:
    life = Life(random.Random(seed))
    life.live(250)
    world = life.world
    for number in life.submitted:
        if number in world.refused:
            refusal = world.refused[number]
            assert isinstance(refusal, TooLate) or "workers lost" in str(refusal)
        else:
            assert number in world.answered_s or number in life.cancelled
    assert world.core.gate.items == 0
    assert all(worker.held_slots == 0 for worker in world.fleet.workers.values())
    assert [(m.queue, m.in_flight) for m in world.core.meters] == [(0, 0)] * life.stages
    assert world.core.next_timer_s() == math.inf

"""Whatever happens around them, only poisoned sessions are failed, and everybody else ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.router.admission import AdmissionBounds
from keystage.router.engine import Generation
from keystage.router.fleet import Fleet
from keystage.router.looping import LoopingCore
from keystage.router.quarantine import PATIENCE_S
from keystage.router.sessions import Deliver, Refuse
from keystage.router.suspects import Cause, Ending
from keystage.wire import api

NEW_TOKENS = 12


class World:
    """A looping core, workers that compute a token when they are told to, and sessions that kill them."""

    def __init__(self, rng: random.Random, stages: int) -> None:
        self.rng, self.stages = rng, stages
        self.core = LoopingCore(Fleet(stages, "p"), AdmissionBounds(max_losses=3), 100, self.waves)
        self.now_s = 0.0
        self.names = 0
        # Sessions that end their worker of a stage when they compute the token at a position.
        self.poisoned: dict[int, tuple[int, int]] = {}
        self.deaths: Counter[int] = Counter()
        self.sessions: set[int] = set()
        self.done: set[int] = set()
        self.refused: dict[int, str] = {}
        self.cancelled: set[int] = set()

    @staticmethod
    def waves(addresses: Iterable[str]) -> int:
        return len(set(addresses))

    def join(self, stages: tuple[int, ...]) -> None:
        self.names += 1
        name, slots = f"w{self.names:04d}", self.rng.choice((1, 2, 8))
        hello = api.Hello(2, "p", stages, name, "b", "emulated", slots, 4096, 8, name, 1, "n", True)
        self.core.fleet.hello(name, hello, self.now_s)
        self.core.fleet.credit(name, api.Credit(name, slots, 4096))
        self.core.fleet.ready(name, self.now_s)
        self.core.worker_ready(name, self.now_s)

    def submit(self) -> None:
        tokens = self.rng.randint(1, 4)
        number = self.core.submit(
            Generation([1] * tokens, NEW_TOKENS, 0.0, 1.0, 0, (), deadline_s=1e9), self.now_s
        )
        self.sessions.add(number)
        if self.rng.random() < 0.2:
            self.poisoned[number] = self.rng.randrange(self.stages), self.rng.randrange(NEW_TOKENS)

    def lose(self, address: str, ending: Ending) -> None:
        stages = self.core.fleet.workers[address].hello.stages
        self.core.fleet.remove(address)
        self.core.worker_lost(address, self.now_s, ending)
        if self.rng.random() < 0.8:
            self.join(stages)

    def path(self, number: int) -> tuple[str, ...] | None:
        session = self.core._sessions.get(number)
        if session is None or session.path is None:
            return None
        return self.core._paths.by_number[session.path].addresses

    def step(self, number: int) -> None:
        """A running session computes its next token, or what ends a worker."""
        session, path = self.core._sessions[number], self.path(number)
        assert path is not None
        stage, position = self.poisoned.get(number, (0, -1))
        if session.generated == position:
            self.deaths[number] += 1
            self.lose(path[stage], Ending(Cause.CRASH, "SIGSEGV", path[stage]))
        else:
            tokens = api.Tokens("w", 1, [number], [session.epoch], [len(session.tokens)], [9])
            self.core.tokens(tokens, self.now_s)

    def told(self) -> None:
        for outcome in self.core.take()[1]:
            if isinstance(outcome, Refuse):
                self.refused[outcome.session] = str(outcome.refusal)
            elif isinstance(outcome, Deliver) and outcome.done:
                self.done.add(outcome.session)

    def check(self) -> None:
        fleet = self.core.fleet
        held: Counter[str] = Counter()
        for number in self.core._sessions:
            path = self.path(number) or ()
            held.update(set(path))
            for address in path:
                only = fleet.workers[address].only
                assert only in (None, number), "somebody runs at a worker that is kept for another"
        for _, handing in ((s, s.handing) for s in self.core._sessions.values() if s.handing):
            held[handing.target] += 1
        assert {a: w.held_slots for a, w in fleet.workers.items()} == {a: held[a] for a in fleet.workers}
        for address, worker in fleet.workers.items():
            if worker.only is not None:
                assert held[address] <= 1
                assert worker.only in self.core._sessions

    def random_event(self) -> None:
        rng, fleet = self.rng, self.core.fleet
        running = [n for n in self.core._sessions if self.path(n)]
        kind = rng.choices(
            ("step", "submit", "cancel", "kill", "join", "drain", "tick"), (30, 6, 1, 1, 2, 1, 4)
        )[0]
        self.now_s += rng.random() * 0.2
        if kind == "step" and running:
            self.step(rng.choice(running))
        elif kind == "submit":
            self.submit()
        elif kind == "cancel" and self.core._sessions:
            number = rng.choice(sorted(self.core._sessions))
            self.cancelled.add(number)
            self.core.cancel(number, self.now_s)
        elif kind == "kill" and fleet.workers:
            cause = rng.choice((Ending(Cause.OUTSIDE, "SIGKILL"), Ending(Cause.OUTSIDE, "SIGTERM")))
            self.lose(rng.choice(sorted(fleet.workers)), cause)
        elif kind == "join":
            self.join((rng.randrange(self.stages),))
        elif kind == "drain" and fleet.workers:
            address = rng.choice(sorted(fleet.workers))
            if fleet.draining(address) is not None:
                self.core.worker_draining(address, self.now_s)
        else:
            self.core.tick(self.now_s)

    def finish(self) -> None:
        """No more accidents, a worker a stage at least: everybody ends."""
        for _ in range(20_000):
            if not self.core._sessions:
                return
            for stage in range(self.stages):
                if not self.core.fleet.ready_replicas(stage):
                    self.join((stage,))
            self.now_s += PATIENCE_S / 4
            self.core.tick(self.now_s)
            for number in list(self.core._sessions):
                if self.path(number):
                    self.step(number)
            self.check()
        raise AssertionError(f"{len(self.core._sessions)} sessions never end")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_poisoned_sessions_are_failed_alone_and_all_others_end(stages: int, seed: int) -> None:
    world = World(random.Random(seed), stages)
    for stage in range(stages):
        for _ in range(world.rng.randint(1, 3)):
            world.join((stage,))
    if world.rng.random() < 0.3:
        world.join(tuple(range(stages)))
    for _ in range(200):
        world.random_event()
        world.told()
        world.check()
    world.finish()
    world.told()
    innocents = world.sessions - set(world.poisoned) - world.cancelled
    assert innocents <= world.done
    assert set(world.refused) <= set(world.poisoned)
    # Who was cancelled, or never came to its poisoned token, killed nobody.
    for number, count in world.deaths.items():
        assert count <= 2 + (stages > 1), world.refused.get(number)
    poisoned = {n for n, deaths in world.deaths.items() if deaths and n not in world.cancelled}
    assert poisoned == set(world.refused)
    assert all(w.only is None and w.held_slots == 0 for w in world.core.fleet.workers.values())

"""One stage of a looping pipeline: waves run and wait at its replicas.

Before it: `ring` binds sessions to paths and says where a wave goes next. After it: waves that have run
are passed on. A wave is the sessions of one path that step together; it is one event at every stage. A
replica runs waves in the order they come; one of the first stage forms a new one when none waits.
"""

from __future__ import annotations

import array
from collections import deque
from heapq import heappush
from typing import Protocol

from keystage.simulator.api import PipelineSpec
from keystage.simulator.engine import DONE, Engine
from keystage.simulator.replica import Replica
from keystage.simulator.stage import Stage


class Path:
    """One replica per stage, and the sessions that step along them.

    Attributes:
        replicas: one per stage.
        waiting: sessions that may step now, in order.
        sessions: sessions bound, under way or waiting.
        waves: waves under way.
    """

    __slots__ = ("replicas", "sessions", "waiting", "waves")

    def __init__(self, replicas: tuple[Replica, ...]) -> None:
        self.replicas = replicas
        self.waiting: deque[int] = deque()
        self.sessions: set[int] = set()
        self.waves = 0

    @property
    def is_broken(self) -> bool:
        """Whether one of its replicas has died."""
        return any(replica.state == "gone" for replica in self.replicas)


Wave = tuple[Path, list[int]]


class Sessions(Protocol):
    """What a stage asks of its pipeline's sessions."""

    def joined(self, at_s: float, k: int) -> None:
        """A replica of stage `k` is ready."""
        ...

    def even_out(self, at_s: float, k: int) -> None:
        """Sessions of stage `k` move to where the load is less."""
        ...

    def unbind(self, at_s: float, dead: Replica) -> None:
        """A replica died."""
        ...

    def form(self, owner: Replica) -> Wave | None:
        """The next wave of a first-stage replica."""
        ...

    def pass_on(self, at_s: float, k: int, replica: Replica, wave: Wave) -> None:
        """A wave has run at stage `k`."""
        ...


class RingStage(Stage):
    """One stage of a looping pipeline: waves queue at a replica, sessions at the entry.

    Attributes:
        waves: waves that wait, by replica.
        waves_run: waves run so far; numbers the draws.
        ring: its pipeline.
    """

    __slots__ = ("ring", "waves", "waves_run")

    def __init__(
        self, engine: Engine, function: str, pipeline: int, index: int, spec: PipelineSpec, items: int,
        factors: array.array[float] | None,
    ) -> None:  # fmt: skip
        super().__init__(engine, function, pipeline, index, spec.stages[index], items, factors)
        self.waves: dict[str, deque[Wave]] = {}
        self.waves_run = 0
        self.ring: Sessions | None = None

    def serve(self, at_s: float, replica: Replica) -> None:
        """See `Stage.serve`: sessions move to it, and the queue may have room."""
        self.waves[replica.name] = deque()
        if self.ring is not None:
            self.ring.joined(at_s, self.index)

    def vacate(self, at_s: float, replica: Replica) -> None:
        """See `Stage.vacate`: its sessions move to others, as far as these have slots."""
        assert self.ring is not None
        self.ring.even_out(at_s, self.index)

    def lose(self, at_s: float, replica: Replica) -> None:
        """See `Stage.lose`."""
        replica.items = None
        self.waves.pop(replica.name, None)
        assert self.ring is not None
        self.ring.unbind(at_s, replica)

    def run(self, at_s: float, replica: Replica, wave: Wave) -> None:
        """An idle replica runs a wave."""
        count = len(wave[1])
        service_s = self.alpha_s * count + self.beta_s
        if self.factors is not None:
            service_s *= self.factors[self.waves_run % len(self.factors)]
        self.waves_run += 1
        replica.items = wave[1]
        replica.service_s = service_s
        engine = self.engine
        heappush(engine.heap, (at_s + service_s, DONE, next(engine.order), self.ran, (replica, wave)))

    def come(self, at_s: float, wave: Wave) -> None:
        """A wave comes from the stage before."""
        path = wave[0]
        if path.is_broken:
            return
        replica = path.replicas[self.index]
        if replica.items is None:
            self.run(at_s, replica, wave)
        else:
            self.waves[replica.name].append(wave)

    def ran(self, at_s: float, what: tuple[Replica, Wave]) -> None:
        """A wave is done here; nothing if the replica died meanwhile."""
        replica, wave = what
        if replica.items is not wave[1]:
            return
        replica.items = None
        replica.busy_s += replica.service_s
        replica.rows += len(wave[1])
        self.batches += 1
        if self.engine.log is not None:
            self.engine.log.write(at_s, "wave", replica.name, wave[1])
        assert self.ring is not None
        self.ring.pass_on(at_s, self.index, replica, wave)
        self.next_wave(at_s, replica)

    def next_wave(self, at_s: float, replica: Replica) -> None:
        """An idle replica runs the next wave that waits for it; the first stage forms one."""
        if replica.items is not None or replica.state == "gone":
            return
        queue = self.waves[replica.name]
        while queue:
            wave = queue.popleft()
            if not wave[0].is_broken:
                self.run(at_s, replica, wave)
                return
        if self.index == 0 and self.ring is not None:
            formed = self.ring.form(replica)
            if formed is not None:
                self.run(at_s, replica, formed)
                return
        if replica.state == "draining" and not replica.held:
            self.on_drained(at_s, replica)

"""The workers a router knows: life, credit, and who is given work. Pure.

Before it: `node` decodes messages. After it: the cores bind work to what `choose` returns. Credit
is absolute: `held` never exceeds what the worker granted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from keystage.router.api import ReplicaStats
from keystage.wire.api import Credit, Heartbeat, Hello

DEAD_AFTER_S = 5.0
"""Heartbeats come every second; five without one is dead (a hung engine loop included)."""


NEAR_SLOTS = 1
"""Workers whose free slots differ by this count as equally free when a path is chosen."""


_NONE_FIXED: Mapping[int, str] = {}


@dataclasses.dataclass(slots=True)
class Worker:
    """One worker as the router sees it.

    Attributes:
        hello: how it introduced itself.
        seen_s: last message.
        is_ready: `Ready` came and no `Draining` since.
        is_draining: `Draining` came.
        ready_s: when it became ready.
        granted_slots: slots this router may hold.
        granted_kv: KV positions this router may reserve.
        held_slots: slots in use.
        held_kv: KV positions in use.
        beat: last heartbeat.
        idle_s: seconds it had nothing of this router in hand, until `idle_from_s`.
        idle_from_s: since when it has nothing, None while it has something or is not ready yet.
        only: request that it is kept free for (`suspects`), None: anybody's.
        is_resting: it is slow beside its like, and is given nothing for a while (`ejection`).
    """

    hello: Hello
    seen_s: float
    is_ready: bool = False
    is_draining: bool = False
    ready_s: float = 0.0
    granted_slots: int = 0
    granted_kv: int = 0
    held_slots: int = 0
    held_kv: int = 0
    beat: Heartbeat | None = None
    idle_s: float = 0.0
    idle_from_s: float | None = None
    only: int | None = None
    is_resting: bool = False

    def works(self, now_s: float) -> None:
        """It was given something."""
        if self.idle_from_s is not None:
            self.idle_s += now_s - self.idle_from_s
            self.idle_from_s = None

    def rests(self, now_s: float) -> None:
        """It has nothing in hand."""
        if self.idle_from_s is None:
            self.idle_from_s = now_s

    @property
    def is_leaving(self) -> bool:
        """Whether it only ends what it has begun."""
        return self.is_draining or self.is_resting

    @property
    def takes_new(self) -> bool:
        """Whether it may be given work at all."""
        return self.is_ready and self.only is None and not self.is_resting

    @property
    def free_slots(self) -> int:
        """Slots that may be given out now, to anybody."""
        return self.granted_slots - self.held_slots if self.takes_new else 0

    @property
    def state(self) -> str:
        """`starting`, `ready` or `draining`."""
        return "draining" if self.is_draining else "ready" if self.is_ready else "starting"

    def admits(self, kv_tokens: int, most_kv: int = 0) -> bool:
        """Whether there is credit for one more session of that size, and it never outgrows the worker."""
        return self.takes_new and self.has_room(kv_tokens, most_kv)

    def has_room(self, kv_tokens: int, most_kv: int = 0) -> bool:
        """The same, whoever it is kept for."""
        if most_kv > self.hello.kv_tokens or not self.is_ready:
            return False
        return self.granted_slots > self.held_slots and self.granted_kv - self.held_kv >= kv_tokens


def replica_stats(worker: Worker, now_s: float) -> ReplicaStats:
    """A worker in the form of `RouterStats`."""
    hello, beat = worker.hello, worker.beat
    has_served = worker.is_ready or worker.is_draining
    resting_s = now_s - worker.idle_from_s if worker.idle_from_s is not None else 0.0
    return ReplicaStats(
        replica=hello.replica,
        stages=hello.stages,
        state=worker.state,
        ready_at_s=worker.ready_s,
        slots=worker.granted_slots,
        held_slots=worker.held_slots,
        busy_s=beat.busy_s if beat else [0.0] * len(hello.stages),
        batches=beat.batches if beat else [0] * len(hello.stages),
        rows=beat.rows if beat else [0] * len(hello.stages),
        kv_blocks=beat.kv_blocks if beat else 0,
        kv_blocks_free=beat.kv_blocks_free if beat else 0,
        preemptions=beat.preemptions if beat else 0,
        served_s=now_s - worker.ready_s if has_served else 0.0,
        idle_s=worker.idle_s + resting_s,
        resting=worker.is_resting,
    )


class Fleet:
    """Workers by inbox address.

    Args:
        stages: number of stages.
        pipeline: name that a `Hello` must carry.
    """

    def __init__(self, stages: int, pipeline: str) -> None:
        self.stages = stages
        self.pipeline = pipeline
        self.workers: dict[str, Worker] = {}

    def hello(self, address: str, message: Hello, now_s: float) -> str | None:
        """Takes (or refuses) an introduction; returns why it is refused."""
        if message.pipeline != self.pipeline or not set(message.stages) <= set(range(self.stages)):
            return (
                f"{message.replica} serves stages {list(message.stages)} of {message.pipeline}, "
                f"this router has {self.stages} stages of {self.pipeline}"
            )
        known = self.workers.get(address)
        if known is None or known.hello.pid != message.pid:
            self.workers[address] = Worker(message, now_s)
        else:
            known.hello = message
            known.seen_s = now_s
        return None

    def ready(self, address: str, now_s: float) -> Worker | None:
        """The worker may be given work; None when unknown or already ready."""
        worker = self.workers.get(address)
        if worker is None or worker.is_ready or worker.is_draining:
            return None
        worker.is_ready, worker.ready_s, worker.seen_s = True, now_s, now_s
        worker.rests(now_s)
        return worker

    def credit(self, address: str, message: Credit) -> None:
        """Takes a new grant."""
        worker = self.workers.get(address)
        if worker is not None:
            worker.granted_slots, worker.granted_kv = message.slots, message.kv_tokens

    def beat(self, address: str, message: Heartbeat, now_s: float) -> bool:
        """Notes a heartbeat; False when the sender is unknown and should introduce itself."""
        worker = self.workers.get(address)
        if worker is None:
            return False
        worker.beat, worker.seen_s = message, now_s
        return True

    def draining(self, address: str) -> Worker | None:
        """The worker takes nothing new; None when unknown or known to drain."""
        worker = self.workers.get(address)
        if worker is None or worker.is_draining:
            return None
        worker.is_ready, worker.is_draining = False, True
        return worker

    def remove(self, address: str) -> Worker | None:
        """The worker is gone."""
        return self.workers.pop(address, None)

    def silent(self, now_s: float) -> list[str]:
        """Addresses without a sign of life for too long."""
        return [a for a, worker in self.workers.items() if now_s - worker.seen_s > DEAD_AFTER_S]

    def of_stage(self, stage: int) -> list[tuple[str, Worker]]:
        """(address, worker) of all workers hosting a stage."""
        return [(a, w) for a, w in self.workers.items() if stage in w.hello.stages]

    def ready_replicas(self, stage: int) -> int:
        """Ready workers hosting a stage."""
        return sum(worker.is_ready for _, worker in self.of_stage(stage))

    def choose_path(
        self,
        kv_tokens: int,
        known: Iterable[tuple[str, ...]] = (),
        most_kv: int = 0,
        fixed: Mapping[int, str] = _NONE_FIXED,
    ) -> tuple[str, ...] | None:
        """One worker per stage, each with credit for one more session; None when a stage has none.

        Per stage the worker with most free slots, but among those nearly as free (`NEAR_SLOTS`)
        first the one that hosts the stage before as well, then one that continues a known path:
        a session more on a known path makes its waves thicker, a new path makes new, thin waves.

        Args:
            kv_tokens: KV positions the session takes credit for.
            known: paths that exist.
            most_kv: KV positions it can ever need; it is bound to workers that have so many in all.
            fixed: workers that were chosen already, by stage.
        """
        path: list[str] = []
        prefixes = list(known)
        for stage in range(self.stages):
            if stage in fixed:
                path.append(fixed[stage])
                prefixes = [addresses for addresses in prefixes if addresses[stage] == path[-1]]
                continue
            admitting = [(a, w) for a, w in self.of_stage(stage) if w.admits(kv_tokens, most_kv)]
            if not admitting:
                return None
            most = max(worker.free_slots for _, worker in admitting)
            continuing = {addresses[stage] for addresses in prefixes}
            best: tuple[bool, bool, int, str, str] | None = None
            for address, worker in admitting:
                if worker.free_slots < most - NEAR_SLOTS:
                    continue
                stays = bool(path) and path[-1] == address and worker.free_slots == most
                key = (
                    not stays,
                    address not in continuing,
                    -worker.free_slots,
                    worker.hello.replica,
                    address,
                )
                best = key if best is None else min(best, key)
            assert best is not None
            path.append(best[4])
            prefixes = [addresses for addresses in prefixes if addresses[stage] == best[4]]
        return tuple(path)

    def hold(self, addresses: Iterable[str], kv_tokens: int = 0, slots: int = 1) -> None:
        """Takes credit at each distinct worker."""
        for address in set(addresses):
            worker = self.workers[address]
            worker.held_slots += slots
            worker.held_kv += kv_tokens

    def give_back(self, addresses: Iterable[str], kv_tokens: int = 0, slots: int = 1) -> None:
        """Returns credit at each distinct worker that still lives."""
        for address in set(addresses):
            worker = self.workers.get(address)
            if worker is not None:
                worker.held_slots -= slots
                worker.held_kv -= kv_tokens
                assert worker.held_slots >= 0
                assert worker.held_kv >= 0

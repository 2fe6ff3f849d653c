"""A scheduler whose cluster is scaled by Symphony's advice, and what it saw second by second.

Before it: `symphony_changing`. After it: the emulated cluster, which runs it as any other scheduler: this one
passes everything on to ours and counts. Once a second it asks `keystage.batching.advice`. With `follows` a
replica asked for is there `start_s` later, and the highest numbers go when fewer are advised (they are
idle: batches go to the smallest number that is free). Without it, the advice is only written down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from keystage.batching.advice import AdviceSettings, AdviceState, Growth, advise
from keystage.batching.api import Dispatch, Drop, Order, Request, Scheduler
from keystage.batching.profile import LatencyProfile


@dataclasses.dataclass(slots=True)
class Second:
    """What happened in one second.

    Attributes:
        arrived: requests that came.
        good: requests dispatched in time for their deadlines.
        bad: requests dropped, or dispatched too late.
        busy_s: replica seconds of batches.
        replicas: that served.
        used: of these, how many had a batch.
        advice: replicas advised more or fewer.
    """

    arrived: int = 0
    good: int = 0
    bad: int = 0
    busy_s: float = 0.0
    replicas: int = 0
    used: int = 0
    advice: int = 0


class Autoscaled:
    """A `Scheduler` around another.

    Args:
        inner: ours.
        profiles: of the models.
        settings: of the advice.
        replicas: at the start.
        follows: whether the advice is carried out.
        start_s: from asking for a replica to its first batch.
    """

    def __init__(
        self,
        inner: Scheduler,
        profiles: list[LatencyProfile],
        settings: AdviceSettings,
        replicas: int,
        *,
        follows: bool,
        start_s: float,
    ) -> None:
        self._inner = inner
        self._profiles = profiles
        self._settings = settings
        self._follows = follows
        self._start_s = start_s
        self._wanted = replicas
        self._most = 0
        self._models: Collection[int] = ()
        self._serving: set[int] = set()
        self._starting: dict[int, float] = {}
        self._state = AdviceState(replicas)
        self._next_s = 1.0
        self._last_arrival_s = 0.0
        self._busy_until_s: dict[int, float] = {}
        self._used: set[int] = set()
        self.seconds: list[Second] = [Second()]

    def add_replica(self, replica: int, models: Collection[int], now_s: float) -> None:
        """A machine of the cluster; it serves when it is among those wanted."""
        self._models = models
        self._most = max(self._most, replica + 1)
        if replica < self._wanted:
            self._serving.add(replica)
            self._inner.add_replica(replica, models, now_s)

    def remove_replica(self, replica: int, now_s: float) -> None:
        """As `Scheduler.remove_replica`."""
        self._serving.discard(replica)
        self._inner.remove_replica(replica, now_s)

    def arrive(self, request: Request, now_s: float) -> None:
        """As `Scheduler.arrive`."""
        self.seconds[-1].arrived += 1
        self._last_arrival_s = now_s
        self._inner.arrive(request, now_s)

    def demote(self, request: Request, now_s: float) -> None:
        """As `Scheduler.demote`."""
        self._inner.demote(request, now_s)

    def cancel(self, request: Request, now_s: float) -> bool:
        """As `Scheduler.cancel`."""
        return self._inner.cancel(request, now_s)

    def finished(self, replica: int, now_s: float) -> None:
        """As `Scheduler.finished`; one that went meanwhile takes nothing more."""
        if replica in self._serving:
            self._inner.finished(replica, now_s)

    def queued(self, model: int) -> int:
        """As `Scheduler.queued`."""
        return self._inner.queued(model)

    def next_timer_s(self) -> float:
        """As `Scheduler.next_timer_s`; at the end of a second while anything comes."""
        own_s = self._next_s if self._next_s < self._last_arrival_s + 2 else math.inf
        return min(own_s, self._inner.next_timer_s())

    def on_timer(self, now_s: float) -> None:
        """As `Scheduler.on_timer`; looks at the second that has ended."""
        if now_s >= self._next_s:
            self._look(now_s)
            self._next_s += 1.0
        self._inner.on_timer(now_s)

    def take(self) -> list[Order]:
        """As `Scheduler.take`; counts what is ordered."""
        orders = self._inner.take()
        second = self.seconds[-1]
        for order in orders:
            if isinstance(order, Dispatch):
                took_s = self._profiles[order.model].latency_s(len(order.requests))
                end_s = order.start_s + took_s
                late = sum(request.deadline_s < end_s - 1e-9 for request in order.requests)
                second.good += len(order.requests) - late
                second.bad += late
                second.busy_s += took_s
                self._used.add(order.replica)
                self._busy_until_s[order.replica] = end_s
            elif isinstance(order, Drop):
                second.bad += len(order.requests)
        return orders

    def _look(self, now_s: float) -> None:
        """Closes a second: asks for advice and follows it."""
        for replica, ready_s in list(self._starting.items()):
            if ready_s <= now_s:
                del self._starting[replica]
                self._serving.add(replica)
                self._inner.add_replica(replica, self._models, now_s)
        second, count = self.seconds[-1], len(self._serving)
        second.replicas, second.used = count, len(self._used & self._serving)
        growth = Growth(1.0, second.good + second.bad, second.bad, count, max(0.0, count - second.busy_s))
        advice, self._state = advise(self._settings, self._state, count, growth)
        second.advice = advice.change
        if self._follows and advice.change > 0:  # those on their way are some of those that are missing
            self._scale(count + max(len(self._starting), advice.change), now_s)
        elif self._follows and advice.change < 0:
            self._scale(count + advice.change, now_s)
        self._used = {replica for replica, end_s in self._busy_until_s.items() if end_s > now_s}
        self.seconds.append(Second())

    def _scale(self, wanted: int, now_s: float) -> None:
        self._wanted = max(1, min(self._most, wanted))
        there = sorted(self._serving | self._starting.keys())
        for replica in reversed(there[self._wanted :]):
            self._starting.pop(replica, None)
            if replica in self._serving:
                self.remove_replica(replica, now_s)
        missing = self._wanted - len(there)
        away = (replica for replica in range(self._most) if replica not in set(there))
        for replica in (r for _, r in zip(range(max(0, missing)), away, strict=False)):
            self._starting[replica] = now_s + self._start_s

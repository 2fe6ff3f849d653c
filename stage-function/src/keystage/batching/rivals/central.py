"""What the centralised rivals share: one queue a model, and a batch as soon as a replica is free. Pure.

Before: the owner's events (`batching.api.Scheduler`). After: `clockwork` and `shepherd`, which say whose
batch a free replica takes, and the second also whom to preempt. It must not defer: that is what they lack.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from keystage.batching.api import Dispatch, Drop, Order, Request
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.line import SLACK_S, Line


class Group:
    """Replicas that serve the same models; `free` is a heap of their numbers."""

    __slots__ = ("free", "models")

    def __init__(self, models: frozenset[int]) -> None:
        self.models = models
        self.free: list[int] = []


class EagerScheduler(ABC):
    """A `Scheduler` that fills every free replica at once; subclasses choose with what.

    Args:
        profiles: service time of each model.
    """

    def __init__(self, profiles: Sequence[LatencyProfile]) -> None:
        self._lines = [Line(profile) for profile in profiles]
        self._groups: dict[frozenset[int], Group] = {}
        self._group_of: dict[int, Group] = {}
        self._hosting: list[list[Group]] = [[] for _ in profiles]
        self._waiting: dict[int, Line] = {}
        self._timers: list[tuple[float, int]] = []
        self._orders: list[Order] = []

    @abstractmethod
    def choose(self, group: Group, now_s: float) -> tuple[int, int] | None:
        """Model and size of the batch from the head that a replica of the group takes now."""

    def started(  # noqa: B027  # a hook: most have nothing to do then
        self, replica: int, requests: list[Request], now_s: float, *, demoted: bool
    ) -> None:
        """A batch was given to a replica; a demoted one has no deadlines to meet."""

    def crowded(self, model: int, now_s: float) -> None:  # noqa: B027  # a hook too
        """A request came and no replica was free for it."""

    def add_replica(self, replica: int, models: Collection[int], now_s: float) -> None:
        """See `Scheduler`."""
        hosted = frozenset(models)
        if replica in self._group_of:
            raise ValueError(f"replica {replica} is there already")
        for model in hosted:
            if not 0 <= model < len(self._lines):
                raise ValueError(
                    f"there are {len(self._lines)} models, replica {replica} is to serve {model}"
                )
        group = self._groups.get(hosted)
        if group is None:
            group = self._groups[hosted] = Group(hosted)
            for model in hosted:
                self._hosting[model].append(group)
        self._group_of[replica] = group
        self.free(replica, now_s)

    def remove_replica(self, replica: int, now_s: float) -> None:
        """See `Scheduler`."""
        group = self._group_of.pop(replica, None)
        if group is not None and replica in group.free:
            group.free.remove(replica)
            heapq.heapify(group.free)

    def arrive(self, request: Request, now_s: float) -> None:
        """See `Scheduler`."""
        model = request.model
        line = self._lines[model]
        line.queue.push(request)
        self._watch(model, line)
        self._waiting[model] = line
        for group in self._hosting[model]:
            if group.free:
                self._fill(group, now_s)
                return
        self.crowded(model, now_s)

    def demote(self, request: Request, now_s: float) -> None:
        """See `Scheduler`."""
        self._lines[request.model].queue.demote(request)
        self._waiting[request.model] = self._lines[request.model]
        for group in self._hosting[request.model]:
            self._fill(group, now_s)

    def cancel(self, request: Request, now_s: float) -> bool:
        """See `Scheduler`."""
        line = self._lines[request.model]
        found = line.queue.remove(request)
        if not len(line):
            self._waiting.pop(request.model, None)
        return found

    def finished(self, replica: int, now_s: float) -> None:
        """See `Scheduler`."""
        if replica in self._group_of:
            self.free(replica, now_s)

    def queued(self, model: int) -> int:
        """See `Scheduler`."""
        return len(self._lines[model])

    def next_timer_s(self) -> float:
        """See `Scheduler`: when the first head could be lost."""
        return self._timers[0][0] if self._timers else math.inf

    def on_timer(self, now_s: float) -> None:
        """See `Scheduler`."""
        timers = self._timers
        while timers and timers[0][0] <= now_s:
            model = heapq.heappop(timers)[1]
            line = self._lines[model]
            line.is_watched = False
            self._expire(model, line, now_s)
            self._watch(model, line)

    def take(self) -> list[Order]:
        """See `Scheduler`."""
        orders = self._orders
        if orders:
            self._orders = []
        return orders

    def free(self, replica: int, now_s: float) -> None:
        """A replica has nothing to do."""
        group = self._group_of[replica]
        heapq.heappush(group.free, replica)
        if self._waiting:
            self._fill(group, now_s)

    def _fill(self, group: Group, now_s: float) -> None:
        """Gives batches to free replicas of a group while there are both."""
        while group.free:
            for model in [model for model in self._waiting if model in group.models]:
                self._expire(model, self._lines[model], now_s)
            chosen = self.choose(group, now_s)
            if chosen is not None:
                model, size = chosen
                requests = self._lines[model].take(size)
            else:
                late = self._demoted(group)
                if late is None:
                    return
                model, requests = late, self._lines[late].take_demoted()
            if not len(self._lines[model]):
                self._waiting.pop(model, None)
            self.dispatch(heapq.heappop(group.free), requests, now_s, demoted=chosen is None)

    def dispatch(self, replica: int, requests: list[Request], now_s: float, *, demoted: bool = False) -> None:
        """Orders a batch to start now."""
        self._orders.append(Dispatch(requests[0].model, replica, requests, now_s))
        self.started(replica, requests, now_s, demoted=demoted)

    def _demoted(self, group: Group) -> int | None:
        """A model of the group that has demoted requests and no others."""
        for model, line in self._waiting.items():
            if model in group.models and line.queue.head is None:
                return model
        return None

    def _expire(self, model: int, line: Line, now_s: float) -> None:
        gone = line.expire(now_s)
        if gone:
            self._orders.append(Drop(model, gone))
            if not len(line):
                self._waiting.pop(model, None)

    def _watch(self, model: int, line: Line) -> None:
        """Sets a timer for the head, one a model; by then the head may be another, which sets the next."""
        head = line.queue.head
        if head is not None and not line.is_watched:
            line.is_watched = True
            # After the last moment at which it could have started, by more than rounding takes away.
            last_s = head.deadline_s - line.profile.latency_s(1)
            heapq.heappush(self._timers, (last_s + 2 * SLACK_S, model))

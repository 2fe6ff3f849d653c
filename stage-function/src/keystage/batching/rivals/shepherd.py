"""A scheduler like Shepherd's Flex (Zhang et al., NSDI 2023), for comparison. Pure.

As Symphony describes it (section 2.2): one candidate a model, the largest batch that can be in time; a free
GPU takes the largest of all. A running batch is cancelled for a candidate at least 3 times its size; its
requests go back to their queue and its work is lost.

Choices of ours: a batch is cancelled only for a candidate that no replica would become free for in time
(what could just wait would make the lost work a gift), and the smallest running batch is the one to go;
cancelling takes no time, which is in its favour. Requests that cannot be in time even alone are dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from keystage.batching.api import Preempt, Request
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.central import EagerScheduler, Group

PREEMPT_AT_RATIO = 3.0
"""Size of a batch over that of the one it cancels (Symphony, section 2.2; Shepherd has 3.03)."""


class ShepherdScheduler(EagerScheduler):
    """Largest batch first, with preemption.

    Args:
        profiles: service time of each model.
        preempt_at_ratio: see `PREEMPT_AT_RATIO`; infinity: never.
    """

    def __init__(
        self, profiles: Sequence[LatencyProfile], preempt_at_ratio: float = PREEMPT_AT_RATIO
    ) -> None:
        super().__init__(profiles)
        self._preempt_at_ratio = preempt_at_ratio
        self._running: dict[int, tuple[float, list[Request], bool]] = {}
        self._ends: list[tuple[float, int]] = []

    def choose(self, group: Group, now_s: float) -> tuple[int, int] | None:
        """The largest candidate of the group's models; of equal ones the more urgent."""
        best: tuple[int, float, int] | None = None
        for model, line in self._waiting.items():
            if model not in group.models:
                continue
            size, head = line.fit(now_s), line.queue.head
            if size and head is not None and (best is None or (size, -head.deadline_s) > best[:2]):
                best = (size, -head.deadline_s, model)
        return None if best is None else (best[2], best[0])

    def started(self, replica: int, requests: list[Request], now_s: float, *, demoted: bool) -> None:
        """Remembers what runs where, until when."""
        end_s = now_s + self._lines[requests[0].model].profile.latency_s(len(requests))
        self._running[replica] = (end_s, requests, demoted)
        heapq.heappush(self._ends, (end_s, replica))

    def finished(self, replica: int, now_s: float) -> None:
        """See `Scheduler`."""
        self._running.pop(replica, None)
        super().finished(replica, now_s)

    def remove_replica(self, replica: int, now_s: float) -> None:
        """See `Scheduler`."""
        self._running.pop(replica, None)
        super().remove_replica(replica, now_s)

    def crowded(self, model: int, now_s: float) -> None:
        """Cancels a batch for this model's candidate if that is large, and lost otherwise."""
        line = self._lines[model]
        size, head = line.fit(now_s), line.queue.head
        if head is None or size < self._preempt_at_ratio:
            return
        latest_s = head.deadline_s - line.profile.latency_s(size)
        if self._first_free_s() <= latest_s:
            return
        victim: tuple[int, int] | None = None
        for group in self._hosting[model]:
            for replica, held in self._group_of.items():
                if held is group and replica in self._running:
                    found = (len(self._running[replica][1]), replica)
                    victim = found if victim is None else min(victim, found)
        if victim is not None and size >= self._preempt_at_ratio * victim[0]:
            self._preempt(victim[1], model, size, now_s)

    def _first_free_s(self) -> float:
        """When the first running batch ends."""
        ends = self._ends
        while ends:
            end_s, replica = ends[0]
            running = self._running.get(replica)
            if running is not None and running[0] == end_s:
                return end_s
            heapq.heappop(ends)
        return float("inf")

    def _preempt(self, replica: int, model: int, size: int, now_s: float) -> None:
        _, requests, demoted = self._running.pop(replica)
        self._orders.append(Preempt(replica))
        taken = self._lines[model].take(size)
        if not len(self._lines[model]):
            self._waiting.pop(model, None)
        victim = requests[0].model
        line = self._waiting[victim] = self._lines[victim]
        for request in requests:
            if demoted:
                line.queue.demote(request)
            else:
                line.queue.push(request)
        self._watch(victim, line)
        self._expire(victim, line, now_s)
        self.dispatch(replica, taken, now_s)

"""Sending batches ahead of their replicas' ends, so that they are there in time (Symphony, appendix D). Pure.

Part of the rank side, for schedulers with delays. A group in which models wait wakes up when its first busy
replica can be sent the batch that takes the longest to arrive. A replica whose estimated end has passed is
not free: it says itself when it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from keystage.batching.api import Delays
from keystage.batching.free_times import NEVER_S
from keystage.batching.group import Group, Replica


class Ahead:
    """Timers of groups and estimated ends of replicas.

    Attributes:
        delays: from a word to the start of a batch.
        is_on: whether there are any; without them nothing is gained by sending ahead.
    """

    __slots__ = ("_ends", "_pushed", "_timers", "delays", "is_on")

    def __init__(self, delays: Delays) -> None:
        self._timers: list[tuple[float, int, Group]] = []
        self._ends: list[tuple[float, int]] = []
        self._pushed = 0
        self.set_delays(delays)

    def set_delays(self, delays: Delays) -> None:
        """They are others from now on."""
        self.delays = delays
        self.is_on = delays.control_s > 0 or delays.data_s > 0
        if not self.is_on:
            for _, _, group in self._timers:
                group.timer_s = NEVER_S
            self._timers.clear()

    def expect_end(self, replica: int, until_s: float) -> None:
        """A replica is to end what it runs then."""
        heapq.heappush(self._ends, (until_s, replica))

    def wake(self, group: Group, urgent: int, after_s: float = -math.inf) -> None:
        """Sets the group's timer.

        Args:
            group: in which models wait.
            urgent: size of the most urgent batch there.
            after_s: what can be sent by then was tried: what cannot is smaller, or waits for something else.
        """
        least_s = group.free.least_s()
        wake_s = least_s - self.delays.of(group.largest)
        if wake_s <= after_s:
            wake_s = least_s - self.delays.of(urgent)
        if after_s < wake_s < group.timer_s:
            group.timer_s = wake_s
            self._pushed += 1
            heapq.heappush(self._timers, (wake_s, self._pushed, group))

    def due(self, replicas: Mapping[int, Replica], now_s: float) -> Iterator[Group]:
        """Groups whose time has come; replicas that are overdue are not free any more."""
        while self._ends and self._ends[0][0] < now_s:
            until_s, replica = heapq.heappop(self._ends)
            known = replicas.get(replica)
            if known is not None and known.until_s == until_s and len(known.running) == 1:
                known.group.free.put(replica, NEVER_S)
        while self._timers and self._timers[0][0] <= now_s:
            wake_s, _, group = heapq.heappop(self._timers)
            if wake_s == group.timer_s:
                group.timer_s = NEVER_S
                yield group

    def next_timer_s(self) -> float:
        """When the next group wakes."""
        timers = self._timers
        while timers and timers[0][0] != timers[0][2].timer_s:
            heapq.heappop(timers)
        return timers[0][0] if timers else math.inf

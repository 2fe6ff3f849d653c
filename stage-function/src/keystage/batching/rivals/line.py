"""Requests of one model that wait at a rival, and its two ways of gathering a batch. Pure.

Before: `arrive` and `demote` of a rival scheduler. After: its choice of a batch. Symphony names the two ways
(section 3.2): from the head while it fits (`fit`), and leaving out heads for a target size (`narrow`).
"""

from __future__ import annotations

from keystage.batching.api import Request
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

SLACK_S = 1e-10
"""What rounding may take from a deadline."""


class Line:
    """What waits for one model.

    Attributes:
        profile: the model's service time.
        queue: its requests.
        is_watched: the scheduler has set a timer for the head.
    """

    __slots__ = ("_largest", "is_watched", "profile", "queue")

    def __init__(self, profile: LatencyProfile) -> None:
        self.profile = profile
        self.queue = RequestQueue()
        self.is_watched = False
        self._largest = 1

    def __len__(self) -> int:
        return len(self.queue)

    def expire(self, now_s: float) -> list[Request]:
        """Takes out the heads that cannot be in time even alone and at once."""
        queue = self.queue
        soonest_s = now_s + self.profile.latency_s(1) - SLACK_S
        count, waiting = 0, queue.in_time
        while count < waiting and queue.at(count).deadline_s < soonest_s:
            count += 1
        return queue.pop_front(count) if count else []

    def fit(self, now_s: float) -> int:
        """The largest batch from the head that is in time when it starts now; 0 when nothing fits."""
        head = self.queue.head
        if head is None:
            return 0
        return min(self.queue.in_time, self.profile.largest_batch(head.deadline_s - now_s + SLACK_S))

    def narrow(self, now_s: float, target: int) -> list[Request]:
        """Takes out the heads that a batch of `target`, or of all that follow, would make late."""
        queue, profile = self.queue, self.profile
        count, waiting = 0, queue.in_time
        while count < waiting:
            end_s = now_s + profile.latency_s(min(target, waiting - count))
            if queue.at(count).deadline_s >= end_s - SLACK_S:
                break
            count += 1
        return queue.pop_front(count) if count else []

    def take(self, size: int) -> list[Request]:
        """The first `size` that wait, for a batch."""
        if size > self._largest:
            self._largest = size
        return self.queue.pop_front(size)

    def take_demoted(self) -> list[Request]:
        """Where nothing waits that can be in time: demoted ones, no more than batches in time have had."""
        return self.queue.pop_front(min(len(self.queue), self._largest))

"""Replicas that serve the same models, and the models that wait for one of them. Pure.

Part of the rank side. A model that may start but has no replica is entered here with its candidate's latest
moment; entries are void once the model's version has moved on and are cleaned out on the way.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from keystage.batching.free_times import NEVER_S, FreeTimes
from keystage.batching.surroundings import Pool

IDLE_S = -math.inf
"""Free time of a replica that runs nothing."""

_SLACK_ENTRIES = 64
"""Entries that may be void before all are cleaned out, beside two for each model."""


class Group:
    """Replicas with equal sets of models.

    Attributes:
        models: that each of them serves.
        pool: how many, how many of them busy; for the policies.
        free: when each is free.
        largest: no waiting batch is larger.
        is_offered: a replica has become free, and who waits is to be looked through.
        timer_s: when a busy replica can be sent a batch ahead of its end.
    """

    __slots__ = ("_waiting", "free", "is_offered", "largest", "models", "pool", "timer_s")

    def __init__(self, models: frozenset[int]) -> None:
        self.models = models
        self.pool = Pool()
        self.free = FreeTimes()
        self.largest = 0
        self.is_offered = False
        self.timer_s = NEVER_S
        self._waiting: list[tuple[float, int, int]] = []

    @property
    def has_waiting(self) -> bool:
        """Whether entries are there, void ones included."""
        return bool(self._waiting)

    def wait(self, model: int, latest_s: float, size: int, versions: Sequence[int]) -> None:
        """A model waits from now on with a batch of this size, as of its present version."""
        waiting = self._waiting
        if len(waiting) > 2 * len(self.models) + _SLACK_ENTRIES:
            waiting[:] = [entry for entry in waiting if entry[2] == versions[entry[1]]]
            heapq.heapify(waiting)
        heapq.heappush(waiting, (latest_s, model, versions[model]))
        if size > self.largest:
            self.largest = size

    def most_urgent(self, versions: Sequence[int]) -> int | None:
        """The waiting model whose latest moment is the closest, None when none waits."""
        waiting, pop = self._waiting, heapq.heappop
        while waiting:
            _, model, version = waiting[0]
            if version == versions[model]:
                return model
            pop(waiting)
        self.largest = 0
        return None


@dataclasses.dataclass(slots=True)
class Replica:
    """One replica.

    Attributes:
        group: where it belongs.
        until_s: estimated end of all that it was sent, `IDLE_S` when that is nothing.
        running: (model, estimated end, seconds it takes) of its batches: the one that runs, and one sent
            ahead.
    """

    group: Group
    until_s: float = IDLE_S
    running: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)

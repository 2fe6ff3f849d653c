"""The model side's rules: of what waits, which batch is next and when may it start. Pure.

A policy computes a `Candidate` from a model's queue whenever something has changed there. All times are those
at which the batch would be *sent*; the profile it gets runs from then to the batch's end, network delays
included (`model_side`). Sources: Symphony, sections 3.1, 3.2 and 3.4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from keystage.batching.api import Candidate
from keystage.batching.deferred import Deferred
from keystage.batching.gather import fill
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

__all__ = ["BatchPolicy", "Deferred", "Eager", "PlainDeferred", "Timeout"]


class BatchPolicy(Protocol):
    """Of what waits, the next batch; keeps no state of a model, so one object may serve many."""

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """The next batch as things stand.

        Args:
            queue: what waits; requests that the policy gives up leave it (`RequestQueue.give_up`).
            profile: seconds from sending a batch to its end.
            now_s: the present.
            earliest_s: no batch can be sent before; later than `now_s` only when a replica that is not free
                yet is offered.

        Returns:
            None when nothing waits.
        """


def _latest_s(queue: RequestQueue, profile: LatencyProfile, size: int) -> float:
    head = queue.head
    return math.inf if head is None else head.deadline_s - profile.latency_s(size)


@dataclasses.dataclass(frozen=True, slots=True)
class Eager:
    """A batch starts as soon as a replica is free."""

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says; starts at once."""
        size = fill(queue, profile, earliest_s)
        return Candidate(size, earliest_s, _latest_s(queue, profile, size)) if size else None


@dataclasses.dataclass(frozen=True, slots=True)
class Timeout:
    """A batch starts so long after its first request came (Symphony, section 3.4).

    Never so late that its first deadline would be missed, and at once when a replica takes no more.

    Attributes:
        k_s: seconds from the first request's arrival; 0 is `Eager`.
    """

    k_s: float

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says."""
        size = fill(queue, profile, earliest_s)
        if not size:
            return None
        latest_s = _latest_s(queue, profile, size)
        head = queue.head
        if head is None or size == profile.most:
            return Candidate(size, earliest_s, latest_s)
        return Candidate(size, max(earliest_s, min(head.arrived_s + self.k_s, latest_s)), latest_s)


@dataclasses.dataclass(frozen=True, slots=True)
class PlainDeferred:
    """A batch starts when one more request could not join it any more (Symphony, Algorithm 1).

    From d - l(b + 1) on, waiting longer cannot make the batch larger; d is the deadline of its first request.
    As printed; `Deferred` is what to use.
    """

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says."""
        size = fill(queue, profile, earliest_s)
        if not size:
            return None
        head = queue.head
        if head is None:
            return Candidate(size, earliest_s, math.inf)
        latest_s = head.deadline_s - profile.latency_s(size)
        if size == profile.most:
            return Candidate(size, earliest_s, latest_s)
        return Candidate(size, max(earliest_s, head.deadline_s - profile.latency_s(size + 1)), latest_s)

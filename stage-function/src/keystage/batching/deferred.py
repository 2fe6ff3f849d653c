"""Deferred batching, with what Symphony's Algorithm 1 lacks near the peak. Pure.

A batch of b with first deadline d may start from its frontrun d - l(b + 1) on (Symphony, section 3.1). Three
rules come on top; none has a constant fitted to a model.

1. *Staggered starts.* In staggered execution N replicas end their batches l(b)/N apart, so that when one is
   free the N - 1 others have (N - 1)/2 l(b) of work left, all together. With less left, the cluster is ahead
   of that pattern: waiting for a larger batch only leaves a replica idle now for a queue later. So a batch
   may also start once the model's batches under way have no more than that left, of n replicas, n being the
   model's part of them (its load over the load of all, times N); a pool's others are given time for two
   batches before the latest start. Where a model has typically about one replica for itself there is nobody
   to alternate with: batches start when one is free (eager). While
   replicas are plentiful the frontrun alone counts (`Candidate.relaxed_s`), so that idle ones stay idle,
   unless arrivals are bursty: they are plentiful before every burst and scarce in it.
2. *Little to gain.* Once waiting until the frontrun would make a request's part of a batch, l(b)/b, less
   than `worth_ratio` cheaper, by the arrival rate and the profile, the batch starts, plentiful or not. Not
   above capacity: there is always enough to start with, and a batch that starts later than another, and is
   smaller for it, ends together with it; soon all replicas end together, and idle until there is enough for
   all. Rule 1 keeps them apart there (where batches help at all).
3. *Target batch.* A batch below the size at which the replicas keep up with the arrivals makes the queue
   grow, the next batches' deadlines nearer and them smaller still. With utilisation u, relative to batches
   of the staggered size b*, that size is the t with t / l(t) = u b* / l(b*), at most b*. Heads that keep a
   batch below it are given up when it is sent, or fewer or more of them where the next batches can be
   foreseen (`lookahead`). Below capacity t is small and nothing is lost; far above it is b*, and the goodput
   stays flat. Nobody is given up for batches that make a request less than `worth_ratio` cheaper than alone.

Not to be done here: anything that needs another model's queue.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from keystage.batching.api import Candidate
from keystage.batching.gather import fill, target
from keystage.batching.lookahead import heads_to_give_up
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.surroundings import Surroundings

ALTERNATING_REPLICAS = 1.25
"""With hardly more than one replica for itself a model has nobody to alternate with."""

ALTERNATING_REPLICAS_BURSTY = 1.75
"""The same where arrivals are bursty: with not quite two all of a burst stands before one replica."""

BURSTY_SCV = 2.5
"""Squared coefficient of variation above which arrivals are bursty; they come at random at 1."""


SPARE_BATCHES = 2
"""Batches of others that a pool may start between a batch being ready and its start."""

ROUNDING = 1e-9
"""A share this little below a whole number is one."""


class Pace(NamedTuple):
    """What loads and replicas say about a model's starts.

    Attributes:
        is_bursty: arrivals are, at its replicas.
        is_overloaded: more comes than its replicas can serve in batches of the staggered size, and these
            make a request cheaper.
        alternates: it has so many replicas that its batches can be staggered.
        staggered_left: work left in its batches under way in staggered execution, in l.
        replicas: those that serve it.
        others: the part of them that is other models'; 0 before loads are known.
    """

    is_bursty: bool
    is_overloaded: bool
    alternates: bool
    staggered_left: float
    replicas: int
    others: float


@dataclasses.dataclass(frozen=True, slots=True)
class Deferred:
    """A batch starts when waiting would not make it worth more; see the module.

    Without surroundings (a queue that no scheduler keeps) it is Algorithm 1 as printed.

    Attributes:
        worth_ratio: how much cheaper a request must get for its batch to wait, at least 0.
    """

    worth_ratio: float = 0.03

    def candidate(
        self, queue: RequestQueue, profile: LatencyProfile, now_s: float, earliest_s: float
    ) -> Candidate | None:
        """As `BatchPolicy` says."""
        around = queue.around
        size = fill(queue, profile, earliest_s)
        if around is not None and around.is_granted and around.rate_rps > 0 and size < queue.in_time:
            size = self._thin(queue, profile, earliest_s, size, around)
        if not size:
            return None
        head = queue.head
        if head is None:
            return Candidate(size, earliest_s, math.inf)
        takes_s = profile.alpha_s * size + profile.beta_s
        latest_s = head.deadline_s - takes_s
        frontrun_s = latest_s - profile.alpha_s
        if frontrun_s <= earliest_s or size == profile.most:
            return Candidate(size, earliest_s, latest_s)
        if around is None:
            return Candidate(size, frontrun_s, latest_s)
        is_bursty, is_overloaded, alternates, staggered_left, replicas, others = around.derived(self._pace)
        relaxed_s = frontrun_s
        if not is_overloaded or size >= around.staggered:
            relaxed_s -= self._no_longer_s(size, takes_s, profile, around)
            if relaxed_s <= earliest_s:
                return Candidate(size, earliest_s, latest_s)
        start_s = earliest_s
        # Until the rate is known, they may be staggered.
        if around.batches and (alternates or around.rate_rps <= 0):
            service_s = around.service.latency_s(size)
            allowed_s = staggered_left * service_s
            # Of what is left when it gets there, every batch under way does a second a second.
            left_s = around.ends_s - around.batches * (earliest_s + takes_s - service_s)
            if left_s > allowed_s:
                start_s += (left_s - allowed_s) / around.batches
        # Shared replicas are free some time later.
        ready_s = latest_s - SPARE_BATCHES * takes_s / replicas * others if others else latest_s
        start_s = max(earliest_s, min(start_s, relaxed_s, ready_s))
        return Candidate(size, start_s, latest_s, -math.inf if is_bursty else relaxed_s)

    def _pace(self, around: Surroundings) -> Pace:
        replicas, share, typical_share, scv, utilisation = around.parts()
        is_bursty = scv > BURSTY_SCV
        return Pace(
            is_bursty,
            utilisation > 1 and self._helps(around.staggered, around.service),
            typical_share > (ALTERNATING_REPLICAS_BURSTY if is_bursty else ALTERNATING_REPLICAS),
            _staggered_left(share),
            replicas,
            1 - share / replicas if 0 < share < replicas else 0.0,
        )

    def _helps(self, batch: int, profile: LatencyProfile) -> bool:
        """Whether a request is worth_ratio cheaper in it than alone."""
        return profile.latency_s(1) * batch > profile.latency_s(batch) * (1 + self.worth_ratio)

    def _thin(
        self, queue: RequestQueue, profile: LatencyProfile, at_s: float, size: int, around: Surroundings
    ) -> int:
        """Gives up the heads that are in the way; the size of the batch then."""
        wanted = target_batch(around)
        if not self._helps(wanted, profile):
            return size
        heads = heads_to_give_up(queue, profile, at_s, size, wanted)
        if heads is None:
            return target(queue, profile, at_s, wanted)
        queue.give_up(heads)
        return fill(queue, profile, at_s)

    def _no_longer_s(self, size: int, takes_s: float, profile: LatencyProfile, around: Surroundings) -> float:
        """How long before the frontrun so few more are expected that waiting for them is not worth it."""
        if around.rate_rps <= 0:
            return 0.0
        if size >= around.staggered:
            return math.inf
        worth_s = takes_s / size / (1 + self.worth_ratio) - profile.alpha_s
        # A batch of beta / worth_s is just so much cheaper a request.
        if worth_s <= 0 or profile.beta_s >= worth_s * around.staggered:
            return math.inf
        return (profile.beta_s / worth_s - size) / around.rate_rps


def _staggered_left(share: float) -> float:
    """Work left in the batches under way when one starts every l / share, in l: sum of 1 - k / share."""
    under_way = math.floor(share + ROUNDING)
    return max(0.0, under_way - under_way * (under_way + 1) / (2 * share)) if under_way else 0.0


def target_batch(around: Surroundings) -> int:
    """The batch at which the replicas keep up with the arrivals, at least 1, at most the staggered one."""
    staggered, profile = around.staggered, around.service
    rate = around.parts().utilisation * staggered / profile.latency_s(staggered)
    spare = 1 - rate * profile.alpha_s
    if spare <= 0 or rate * profile.beta_s >= staggered * spare:
        return staggered
    return max(1, round(rate * profile.beta_s / spare))

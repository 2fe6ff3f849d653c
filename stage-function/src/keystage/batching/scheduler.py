"""The central scheduler: every model's side and the rank side, joined. Pure.

Used as it is by the router, the simulator and the benchmarks: they tell it of arrivals and of batches that
ended, call `on_timer` when it asks for it, and carry out the orders they `take`. It reads no clock.
Symphony, Algorithm 1 and appendix D.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from keystage.batching.api import Delays, Dispatch, Drop, Order, Request
from keystage.batching.model_side import ModelSide
from keystage.batching.policies import BatchPolicy
from keystage.batching.profile import LatencyProfile
from keystage.batching.rank import Grant, RankSide

DROP_AFTER_S = 1e-6
"""A request is dropped this long after its last possible start: by then rounding cannot revive it."""


LOOK_EVERY_S = 0.1
"""Whether fewer requests come than before is asked for each model so often, at most."""

SLACK_TIMERS = 64
"""Timers that may be void before all are cleaned out, beside two for each model."""


class CentralScheduler:
    """A `Scheduler` (see `api`) for models with a profile and a policy each.

    Args:
        sides: for each model, numbered from 0, its profile and its policy.
        delays: from this scheduler's word to the start of the work.
    """

    def __init__(
        self, sides: Sequence[tuple[LatencyProfile, BatchPolicy]], delays: Delays | None = None
    ) -> None:
        delays = delays or Delays()
        self._delays = delays
        self._sides = [ModelSide(profile, policy, delays) for profile, policy in sides]
        self._rank = RankSide([side.around for side in self._sides], delays)
        self._looked = 0
        self._look_s = -math.inf
        self._drop_timers: list[tuple[float, int]] = []
        self._drop_s = [math.inf] * len(self._sides)
        self._orders: list[Order] = []

    def add_replica(self, replica: int, models: Collection[int], now_s: float) -> None:
        """As `Scheduler.add_replica`."""
        self._rank.add_replica(replica, models)
        self._settle(now_s)

    def remove_replica(self, replica: int, now_s: float) -> None:
        """As `Scheduler.remove_replica`."""
        self._rank.remove_replica(replica)
        self._settle(now_s)

    def set_profile(self, model: int, profile: LatencyProfile, now_s: float) -> None:
        """A model's profile is another from now on; batches under way keep their estimates."""
        self._sides[model].set_profile(profile)
        self._update(model, now_s)
        self._settle(now_s)

    def set_delays(self, delays: Delays, now_s: float) -> None:
        """The delays are others from now on."""
        self._delays = delays
        self._rank.set_delays(delays)
        for model, side in enumerate(self._sides):
            side.set_delays(delays)
            self._update(model, now_s)
        self._settle(now_s)

    def idle(self, model: int) -> int:
        """Replicas of a model that run nothing, for policies that share out; in O(G)."""
        return self._rank.idle(model)

    def arrive(self, request: Request, now_s: float) -> None:
        """As `Scheduler.arrive`."""
        self._sides[request.model].arrive(request, now_s)
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_EVERY_S / len(self._sides)
            self._looked = looked = (self._looked + 1) % len(self._sides)
            self._sides[looked].look(now_s)
        self._update(request.model, now_s)
        self._settle(now_s)

    def demote(self, request: Request, now_s: float) -> None:
        """As `Scheduler.demote`."""
        self._sides[request.model].queue.demote(request)
        self._update(request.model, now_s)
        self._settle(now_s)

    def cancel(self, request: Request, now_s: float) -> bool:
        """As `Scheduler.cancel`."""
        if not self._sides[request.model].queue.remove(request):
            return False
        self._update(request.model, now_s)
        self._settle(now_s)
        return True

    def finished(self, replica: int, now_s: float) -> None:
        """As `Scheduler.finished`."""
        model = self._rank.finish(replica, now_s)
        if model is not None and self._sides[model].candidate is not None:
            # Its work under way has become less: it may start now, beside those that wait.
            self._update(model, now_s)
            self._rank.contend(model, now_s)
        self._settle(now_s)

    def queued(self, model: int) -> int:
        """As `Scheduler.queued`."""
        return len(self._sides[model].queue)

    def next_timer_s(self) -> float:
        """As `Scheduler.next_timer_s`."""
        next_s = self._rank.next_timer_s()
        timers = self._drop_timers
        return timers[0][0] if timers and timers[0][0] < next_s else next_s

    def on_timer(self, now_s: float) -> None:
        """As `Scheduler.on_timer`."""
        self._settle(now_s)

    def take(self) -> list[Order]:
        """As `Scheduler.take`."""
        orders, self._orders = self._orders, []
        return orders

    def _update(self, model: int, now_s: float, granted_s: float | None = None) -> None:
        side = self._sides[model]
        if granted_s is None:
            candidate = side.update(now_s, now_s)
        else:
            candidate = side.update(now_s, granted_s, is_granted=True)
        queue = side.queue
        if queue.has_given_up:
            self._orders.append(Drop(model, queue.take_given_up()))
        self._rank.inform(model, candidate, now_s)
        head = queue.head
        if head is not None:
            drop_s = head.deadline_s - side.alone_s + DROP_AFTER_S
            if drop_s < self._drop_s[model]:
                self._set_drop_timer(model, drop_s)

    def _set_drop_timer(self, model: int, drop_s: float) -> None:
        self._drop_s[model] = drop_s
        timers = self._drop_timers
        if len(timers) > 2 * len(self._sides) + SLACK_TIMERS:
            # Those of requests that can wait for ever are never due.
            timers[:] = [timer for timer in timers if timer[0] == self._drop_s[timer[1]]]
            heapq.heapify(timers)
        heapq.heappush(timers, (drop_s, model))

    def _settle(self, now_s: float) -> None:
        timers = self._drop_timers
        while timers and timers[0][0] <= now_s:
            due_s, model = heapq.heappop(timers)
            if due_s == self._drop_s[model]:
                # Set for a head that may be gone by now: `_update` sets it for the one that is there.
                self._drop_s[model] = math.inf
                self._update(model, now_s)
        while (grant := self._rank.next_grant(now_s)) is not None:
            self._carry_out(grant, now_s)

    def _carry_out(self, grant: Grant, now_s: float) -> None:
        model, replica, free_s = grant
        side = self._sides[model]
        if replica is None:
            self._update(model, now_s)
            return
        candidate = side.candidate
        assert candidate is not None
        earliest_s = max(now_s, free_s - self._delays.of(candidate.size))
        self._update(model, now_s, earliest_s)
        candidate = side.candidate
        if candidate is None or candidate.start_s > earliest_s:
            return
        requests, start_s = side.release(candidate.size, now_s, free_s)
        self._rank.sent(model)
        self._rank.start(model, replica, start_s, side.profile.latency_s(len(requests)))
        self._orders.append(Dispatch(model, replica, requests, start_s))
        self._update(model, now_s)

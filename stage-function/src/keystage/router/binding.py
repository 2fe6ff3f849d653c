"""Between items that wait and workers that serve: numbers, requests and credit for the scheduler. Pure.

Before it: `single` says which item waits where and what workers report. After it: `single` sends the
batches that `settle` returns. A `Scheduler` of `keystage.batching` decides which batch runs when and where;
this module translates: a stage is a model, a worker a replica with a small number (the first free one when
it becomes ready, so that idle workers stay idle), an item at a stage a request with a stage deadline. A
worker holds one batch that it computes and at most one that it received ahead; a batch for which it has no
credit waits here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from keystage.batching.api import Delays, Dispatch, Drop, Order, Preempt, Request
from keystage.batching.deadlines import cumulative_shares, stage_deadline_s
from keystage.batching.profile import ANY_BATCH, LatencyProfile
from keystage.batching.scheduler import CentralScheduler
from keystage.batching.stage_policy import PATIENCE_S, StagePolicy, StageRequest
from keystage.router.batch_settings import BatchSettings
from keystage.router.fleet import Fleet, Worker
from keystage.router.hands import Batch, Hands
from keystage.router.service_times import UNKNOWN, ServiceTimes, differs
from keystage.router.sessions import Item
from keystage.router.suspects import Suspects

DELAY_RATIO = 0.1
"""The same of delays, which are a high percentile of what is small and varies."""

DARK_S = 0.5
"""A stage that has computed nothing for so long tries an item that seems to be too late."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """Items to be sent to a worker now."""

    address: str
    stage: int
    last: int
    items: list[Item]


class _Waiting(StageRequest):
    """An item at its stage."""

    __slots__ = ("item",)

    def __init__(self, item: Item, deadline_s: float, share_s: float, *, is_dated: bool) -> None:
        super().__init__(item.number, item.stage, item.queued_s, deadline_s, share_s, is_dated=is_dated)
        self.item = item


class Binding:
    """Items of one single-pass pipeline and the workers of its fleet.

    Args:
        fleet: the workers and their credit.
        settings: policy and what becomes of late requests.
        times: service times.
        is_full: whether too much waits for a stage for more to be made for it.
        suspects: items that run apart: in a batch of their own, at a worker with nothing else.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: BatchSettings,
        times: ServiceTimes,
        is_full: Callable[[int], bool],
        suspects: Suspects,
    ) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._settings = settings
        self._times = times
        self._is_full = is_full
        self._policies = [StagePolicy(settings.batching, partial(self._idle, k)) for k in range(fleet.stages)]
        self._scheduler = CentralScheduler([(UNKNOWN, policy) for policy in self._policies])
        self._delays = Delays()
        self._measured_s = [-math.inf] * fleet.stages
        self._ends = list(range(fleet.stages))
        self._profiles = [UNKNOWN] * fleet.stages
        self.shares = cumulative_shares(times.of_stages())
        self._least_s = times.least_s()
        self._numbers: dict[str, int] = {}
        self._addresses: dict[int, str] = {}
        # What each numbered worker is offered for; an empty set: it is not known to the scheduler.
        self._offered: dict[str, frozenset[int]] = {}
        self._hands = Hands(fleet)
        # Batches that were decided on, for workers that have no credit for them yet.
        self._withheld: dict[str, tuple[int, list[_Waiting]]] = {}
        self._requests: dict[int, _Waiting] = {}
        self._coming: list[list[_Waiting]] = [[] for _ in range(fleet.stages)]
        self._orders: list[Order] = []
        # Set when another look at the workers is due; which stages had too much waiting at the last one.
        self._is_stale = True
        self._full: tuple[bool, ...] = ()

    # ------------------------------------------------------------ items

    def wait(self, item: Item) -> None:
        """An item waits for its stage; it is given to the scheduler when `settle` is called."""
        stage = item.stage
        is_dated = self._settings.plans_for(item.due_s, item.arrived_s)
        deadline_s, share_s = item.arrived_s + PATIENCE_S, 0.0
        if is_dated:
            deadline_s = self.stage_due_s(item, self._ends[stage])
            share_s = deadline_s - (self.stage_due_s(item, stage - 1) if stage else item.arrived_s)
        request = _Waiting(item, deadline_s, share_s, is_dated=is_dated)
        self._requests[item.number] = request
        self._coming[stage].append(request)

    def withdraw(self, item: Item, now_s: float) -> None:
        """An item waits no more, for whatever reason but a batch."""
        request = self._requests.pop(item.number)
        coming = self._coming[request.model]
        if request in coming:
            coming.remove(request)
        elif not self._scheduler.cancel(request, now_s):
            for address, (_, held) in list(self._withheld.items()):
                if request in held:
                    held.remove(request)
                    if not held:
                        del self._withheld[address]
                        self._scheduler.finished(self._numbers[address], now_s)

    def stage_due_s(self, item: Item, stage: int) -> float:
        """When a stage should be done with an item."""
        return stage_deadline_s(item.arrived_s, item.due_s, self.shares[stage])

    # ------------------------------------------------------------ workers

    def reported(
        self, keys: Iterable[tuple[int, int]], started_s: float, compute_s: float, now_s: float
    ) -> None:
        """A worker is done with these items (number, epoch); some may be gone here.

        Args:
            keys: the items.
            started_s: seconds that they waited at the worker.
            compute_s: seconds of compute of their batch, 0: it failed, and measures nothing.
            now_s: the time.
        """
        for key in keys:
            batch = self._hands.reported(key, now_s)
            if batch is None:
                continue
            self._scheduler.finished(self._numbers[batch.address], now_s)
            self._fleet.workers[batch.address].only = None
            self._is_stale |= not self._offered.get(batch.address)
            if compute_s > 0:
                elsewhere_s = now_s - batch.sent_s - started_s - compute_s
                span = batch.stage, batch.last
                self._measured_s[batch.stage] = now_s
                if self._times.measured(batch.address, span, batch.size, compute_s, elsewhere_s, now_s):
                    self._learn(now_s)

    def workers_changed(self) -> None:
        """A worker became ready, drains, or has other credit."""
        self._is_stale = True

    def lost(self, address: str, now_s: float) -> int:
        """A worker is gone; what it held is the caller's business, what was withheld for it waits again.

        Returns:
            Items that it had in hand, those that were cancelled meanwhile included.
        """
        self._times.forget(address)
        self._retire(address, now_s)
        return self._hands.lost(address)

    # ------------------------------------------------------------ decisions

    def next_timer_s(self) -> float:
        """When `settle` is to be called at the latest."""
        return self._scheduler.next_timer_s()

    def settle(self, now_s: float) -> tuple[list[Bound], list[Item]]:
        """Lets the scheduler decide on what has come and changed.

        Returns:
            Batches to be sent, in order, and items that it gave up (they wait still, see `demote`).
        """
        self._offer(now_s)
        for stage, coming in enumerate(self._coming):
            if coming:
                self._coming[stage] = []
                self._enter(stage, coming, now_s)
        self._scheduler.on_timer(now_s)
        bound: list[Bound] = []
        given_up: list[Item] = []
        for address in list(self._withheld):
            self._bind(address, *self._withheld.pop(address), bound, now_s)
        while orders := self._orders + self._scheduler.take():
            self._orders = []
            for order in orders:
                match order:
                    case Dispatch(stage, replica, requests, _):
                        waiting = self._still_waiting(requests)
                        if waiting:
                            self._bind(self._addresses[replica], stage, waiting, bound, now_s)
                        else:
                            self._scheduler.finished(replica, now_s)
                    case Drop(_, requests):
                        given_up += [request.item for request in self._still_waiting(requests)]
                    case Preempt():
                        raise AssertionError("a router's scheduler does not preempt")
        return bound, given_up

    def is_hopeless(self, item: Item, now_s: float) -> bool:
        """Whether an item would miss its own deadline even if it were served at once.

        The scheduler gives up more: it plans with high percentiles, and by the deadlines of stages.
        """
        return now_s + self._least_s[item.stage] > item.due_s

    def is_in_the_dark(self, stage: int, now_s: float) -> bool:
        """Whether nothing was heard of a stage's service time lately, and nothing is under way to tell.

        What is given up then may be given up wrongly, and if all is refused it is so for ever.
        """
        if now_s - self._measured_s[stage] <= DARK_S:
            return False
        return not self._hands.has_stage(stage)

    def is_demoted(self, item: Item) -> bool:
        """Whether a waiting item was given up."""
        return self._requests[item.number].is_demoted

    def demote(self, item: Item, now_s: float) -> None:
        """An item that was given up waits on behind the others."""
        request = self._requests[item.number]
        request.is_demoted = True
        self._scheduler.demote(request, now_s)

    # ------------------------------------------------------------ inside

    def _still_waiting(self, requests: Sequence[Request]) -> list[_Waiting]:
        """Those of an order that were not withdrawn since it was made."""
        found = (self._requests.get(request.number) for request in requests)
        return [
            request
            for request, known in zip(requests, found, strict=True)
            if known is request and isinstance(request, _Waiting)
        ]

    def _enter(self, stage: int, requests: list[_Waiting], now_s: float) -> None:
        """Gives requests to the scheduler as of one moment."""
        policy = self._policies[stage]
        for place, request in enumerate(requests, 1):
            policy.is_gathering = place < len(requests)
            if request.is_demoted:
                self._scheduler.demote(request, now_s)
            else:
                self._scheduler.arrive(request, now_s)

    def _bind(
        self, address: str, stage: int, requests: list[_Waiting], bound: list[Bound], now_s: float
    ) -> None:
        """Sends what the worker has credit for; one batch has one element type. The rest waits again."""
        worker = self._fleet.workers[address]
        most = min(worker.free_slots, worker.hello.max_batch)
        is_apart = self._is_apart(requests[0], worker)
        if is_apart and most:
            most = int(self._hands.is_empty(address))
        if most < 1:
            self._withheld[address] = stage, requests
            return
        dtype = requests[0].item.dtype
        sent: list[_Waiting] = []
        rest: list[_Waiting] = []
        for request in requests:
            fits = not rest and len(sent) < most and request.item.dtype == dtype
            fits = fits and (not sent or not self._is_apart(request, worker))
            (sent if fits else rest).append(request)
        items = [request.item for request in sent]
        for item in items:
            del self._requests[item.number]
        last = last_stage(stage, worker.hello.stages)
        keys = {(item.number, item.epoch) for item in items}
        self._hands.give(Batch(address, stage, last, len(items), now_s, keys))
        self._fleet.hold([address], slots=len(items))
        bound.append(Bound(address, stage, last, items))
        if is_apart:
            worker.only, self._is_stale = items[0].number, True
        if rest:
            self._enter(stage, rest, now_s)

    def _is_apart(self, request: _Waiting, worker: Worker) -> bool:
        """Whether an item is not to meet others in its next run at a worker."""
        found = self._suspects.apart(request.number)
        if found is None:
            return False
        return any(request.model <= k <= last_stage(request.model, worker.hello.stages) for k in found.stages)

    def _offer(self, now_s: float) -> None:
        """Tells the scheduler which workers serve which stages now, where that may have changed."""
        full = tuple(self._is_full(stage) for stage in range(self._fleet.stages + 1))
        if not self._is_stale and full == self._full:
            return
        self._is_stale, self._full = False, full
        has_changed = False
        for address, worker in self._fleet.workers.items():
            open_stages = self._open_stages(worker)
            if self._offered.get(address, _NOTHING) == open_stages:
                continue
            if self._offered.get(address):
                self._withdraw_offer(address, now_s)
                has_changed = True
            # A worker with something in hand is offered anew when it has nothing: the scheduler takes
            # whom it does not know for free.
            if open_stages and self._hands.is_empty(address):
                number = self._numbers.get(address)
                if number is None:
                    number = self._numbers[address] = self._smallest()
                    self._addresses[number] = address
                self._offered[address] = open_stages
                self._scheduler.add_replica(number, open_stages, now_s)
                has_changed = True
        if has_changed:
            self._learn(now_s)

    def _open_stages(self, worker: Worker) -> frozenset[int]:
        """Stages for which a worker may be given work at all."""
        if not worker.takes_new or worker.granted_slots < 1:
            return _NOTHING
        hosted = worker.hello.stages
        return frozenset(k for k in hosted if not self._full[last_stage(k, hosted) + 1])

    def _withdraw_offer(self, address: str, now_s: float) -> None:
        """It is given nothing more; what was decided for it, and not sent, waits again."""
        number = self._numbers[address]
        self._offered[address] = _NOTHING
        orders = self._orders + self._scheduler.take()
        void = [order for order in orders if isinstance(order, Dispatch) and order.replica == number]
        self._orders = [order for order in orders if order not in void]
        self._scheduler.remove_replica(number, now_s)
        returned = [(order.model, self._still_waiting(order.requests)) for order in void]
        if address in self._withheld:
            returned.append(self._withheld.pop(address))
        for stage, requests in returned:
            self._enter(stage, requests, now_s)

    def _retire(self, address: str, now_s: float) -> None:
        if self._offered.pop(address, None):
            self._offered[address] = frozenset((-1,))
            self._withdraw_offer(address, now_s)
            del self._offered[address]
        number = self._numbers.pop(address, None)
        if number is not None:
            del self._addresses[number]

    def _smallest(self) -> int:
        """The smallest number that no worker has."""
        return next(n for n in range(len(self._addresses) + 1) if n not in self._addresses)

    def _idle(self, stage: int) -> int:
        return self._scheduler.idle(stage)

    def _learn(self, now_s: float) -> None:
        """Profiles and deadlines as they are known now."""
        self.shares = cumulative_shares(self._times.of_stages())
        self._least_s = self._times.least_s()
        delays = self._times.delays()
        if abs(delays.of(1) - self._delays.of(1)) > DELAY_RATIO * self._delays.of(1):
            self._delays = delays
            self._scheduler.set_delays(delays, now_s)
        for stage in range(self._fleet.stages):
            hosts = [(a, w) for a, w in self._fleet.of_stage(stage) if w.is_ready and not w.is_resting]
            if not hosts:
                continue
            # A request that some worker takes through several stages has the deadline and the profile of
            # the longest such run: where it takes less, the time left carries on.
            end = max(last_stage(stage, worker.hello.stages) for _, worker in hosts)
            most = max(worker.hello.max_batch for _, worker in hosts)
            known = self._times.span(stage, end, {address for address, _ in hosts}, min(most, ANY_BATCH))
            profile = known or LatencyProfile(UNKNOWN.alpha_s, UNKNOWN.beta_s, most)
            self._ends[stage] = end
            self._policies[stage].is_known = known is not None
            if differs(profile, self._profiles[stage]):
                self._profiles[stage] = profile
                self._scheduler.set_profile(stage, profile, now_s)


_NOTHING: frozenset[int] = frozenset()


def last_stage(stage: int, hosted: Iterable[int]) -> int:
    """The last of the stages from `stage` on that a worker hosts without a gap."""
    mine = set(hosted)
    while stage + 1 in mine:
        stage += 1
    return stage

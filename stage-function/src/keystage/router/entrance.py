"""Who waits to be begun, whether waiting makes sense, and whose turn it is. Pure.

Over `fair_queue` (whose turn it is), `drain` (how fast it goes), `admission` (how many may wait). A request
that cannot be answered by its deadline is refused at once:

    finish = work before it / drain rate + service

Decision 027 says what the prediction is worth: a request is refused where even nine tenths of the wait and
the shortest usual service are too long. When its turn comes, one that would be late all the same is refused
rather than served, if others wait: that keeps goodput flat. Where nothing was measured lately, everybody is
admitted.
"""

from __future__ import annotations

import dataclasses
import math

from keystage.router.admission import Gate
from keystage.router.api import TenantCounters
from keystage.router.drain import MEMORY_S, DrainRate, ServiceSeconds
from keystage.router.engine import DeadlineUnreachable, QueueFull
from keystage.router.fair_queue import FairQueue, Waiter
from keystage.router.fleet import Fleet

ERROR_RATIO = 0.1
"""The part of a predicted wait that it may be wrong by, in favour of the request."""
MARGIN_RATIO = 0.5
"""What is left for service when a turn comes need not be more than this part of the whole deadline."""
DARK_S = 0.5
"""When nothing was answered for so long, one request tries what a refusal would rest on."""
MOST_RETRY_S = 600.0
MOST_TENANTS = 256
"""Of which counters are kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """When a request would be answered, from now.

    Attributes:
        wait_s: until its turn.
        service_s: the shortest usual service after that.
    """

    wait_s: float
    service_s: float

    @property
    def least_s(self) -> float:
        """The earliest that is to be expected."""
        return (1 - ERROR_RATIO) * self.wait_s + self.service_s


@dataclasses.dataclass(slots=True)
class _Share:
    """What a tenant got."""

    begun: int = 0
    work: float = 0.0
    refused: int = 0


class Entrance:
    """Requests that wait to be begun.

    Args:
        gate: their bounds; whoever keeps the requests gives places back.
        unit: what work is counted in, for refusals.
    """

    def __init__(self, gate: Gate, unit: str) -> None:
        self.gate = gate
        self.queue = FairQueue(gate.bounds.weight_of)
        self.drain = DrainRate()
        self._unit = unit
        # Where nobody else waited, and where others did: shared devices are slower for each.
        self._calm, self._busy = ServiceSeconds(), ServiceSeconds()
        self._begun: dict[int, tuple[float, float, ServiceSeconds]] = {}
        self._slots: tuple[int, ...] = ()
        self._tried_s = -math.inf
        self._trying = -1
        self._shares: dict[str, _Share] = {}

    def __len__(self) -> int:
        return len(self.queue)

    def enter(
        self, waiter: Waiter, nbytes: int, length: float, limit_s: float, now_s: float
    ) -> tuple[int, QueueFull] | None:
        """Admits a request.

        Args:
            waiter: the request.
            nbytes: that it keeps.
            length: of its service: what that takes is learned for one of length 1.
            limit_s: seconds within which it is to be answered.
            now_s: the time.

        Returns:
            Who has to go in its favour, and why: the newest request of the tenant most over its share, where
            the queue is full and this one's tenant is within its own. To be called again after that.

        Raises:
            QueueFull: a bound is reached.
            DeadlineUnreachable: it cannot be answered in time.
        """
        share = self._share(waiter.tenant)
        share.refused += 1  # until it is admitted
        self._check_deadline(waiter, length, limit_s, now_s)
        full = self.gate.why_full(nbytes)
        if full is not None:
            victim = self._over_share(waiter.tenant, nbytes)
            full.retry_after_s = self.retry_after_s(now_s)
            if victim is None:
                raise full
            share.refused -= 1
            self._share(self.queue.tenant_of(victim)).refused += 1
            gone = (
                f"{full}; another tenant is within its share, and this was the newest of the one most over it"
            )
            return victim, QueueFull(gone, retry_after_s=full.retry_after_s)
        share.refused -= 1
        self.gate.enter_again(nbytes, waiter.tenant)
        self.queue.push(waiter)
        return None

    def begin(self, length: float, now_s: float, *, is_first: bool = True) -> Waiter:
        """Takes the next one, which is served from now; `is_first`: for the first time."""
        waiter = self.queue.pop()
        if is_first:
            share = self._share(waiter.tenant)
            share.begun += 1
            share.work += waiter.cost
            is_more = len(self.queue) > 0
            self._left(waiter.cost, now_s, is_more=is_more)
            self._begun[waiter.number] = now_s, length, self._busy if is_more else self._calm
        return waiter

    def again(self, waiter: Waiter, nbytes: int) -> None:
        """One that was begun lost its worker: it waits before all others, and measures nothing."""
        self._begun.pop(waiter.number, None)
        self.gate.enter_again(nbytes, waiter.tenant)
        self.queue.push_front(waiter)

    def leave(self, number: int) -> None:
        """One waits no longer, and is not begun."""
        self.queue.remove(number)
        if not len(self.queue):
            self._emptied()

    def ended(self, number: int, answered_s: float | None = None) -> None:
        """One that was begun is over, or starts over; `answered_s`: when it was answered."""
        begun = self._begun.pop(number, None)
        if begun is not None and answered_s is not None:
            begun_s, length, service = begun
            service.took(answered_s - begun_s, length, answered_s)

    def adapt(self, fleet: Fleet) -> None:
        """The workers or their credit may have changed: with more of them the rate is higher at once."""
        slots = tuple(
            sum(worker.granted_slots for _, worker in fleet.of_stage(stage) if worker.is_ready)
            for stage in range(fleet.stages)
        )
        if slots == self._slots:
            return
        if not all(slots) or not self._slots or not all(self._slots):
            self.drain.forget()
        else:
            self.drain.grew(max(1.0, *(now / was for now, was in zip(slots, self._slots, strict=True))))
        self._slots = slots

    def predict(self, waiter: Waiter, length: float, now_s: float) -> Prediction | None:
        """When a request would be answered if it came now; None: nothing is known, or nobody serves."""
        if not all(self._slots):
            return None
        if not len(self.queue):
            return Prediction(0.0, self.alone_s(length))
        rate = self.drain.per_s(now_s)
        if rate is None:
            return None
        return Prediction(self.queue.ahead(waiter) / rate, self._busy.least_s(length))

    def alone_s(self, length: float) -> float:
        """The shortest service of one that finds nobody waiting."""
        return self._calm.fastest_s(length)

    def is_hopeless(self, length: float, left_s: float, limit_s: float, now_s: float) -> bool:
        """Whether the request whose turn has come would be late.

        While others wait, it must be as good as sure that it is not: they can use the time.

        Args:
            length: of its service.
            left_s: until its deadline.
            limit_s: what it had when it came.
            now_s: the time.
        """
        if len(self.queue) > 1:
            most_s = min(self._busy.most_s(length), MARGIN_RATIO * limit_s)
            needed_s = max(self._busy.mean_s(length), most_s)
        else:
            needed_s = self.alone_s(length)
        number = self.queue.peek()
        return needed_s > left_s and number is not None and not self._tries(number, now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until half of what waits has gone, between 1 and 60."""
        rate = self.drain.per_s(now_s)
        if rate is None or not len(self.queue):
            return self.gate.retry_after_s()
        return float(min(60, max(1, math.ceil(self.queue.cost / 2 / rate))))

    def tenants(self) -> dict[str, TenantCounters]:
        """Counters of those that have a name, which are as many as there are in the file of keys."""
        held = self.gate.tenants
        return {
            name: TenantCounters(
                share.begun, share.work, share.refused, held[name].items if name in held else 0
            )
            for name, share in self._shares.items()
            if name
        }

    def _share(self, tenant: str) -> _Share:
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) > MOST_TENANTS:  # the file has changed often
                del self._shares[next(iter(self._shares))]
            share = self._shares[tenant] = _Share()
        return share

    def _left(self, work: float, now_s: float, *, is_more: bool) -> None:
        """Work is begun."""
        self.drain.left(work, now_s, is_more=is_more, memory_s=max(MEMORY_S, 4 * self._busy.usual_s))

    def _emptied(self) -> None:
        """Nobody waits, though nobody was begun."""
        self.drain.emptied()

    def _check_deadline(self, waiter: Waiter, length: float, limit_s: float, now_s: float) -> None:
        found = self.predict(waiter, length, now_s)
        if found is None or found.least_s <= limit_s:
            return
        if found.service_s > limit_s and self._tries(waiter.number, now_s):
            return
        rate = self.drain.per_s(now_s)
        drains = f" at {rate:.4g} {self._unit} a second" if rate and found.wait_s else ""
        raise DeadlineUnreachable(
            f"it would be answered in {found.wait_s + found.service_s:.3g} s at the earliest, its deadline "
            f"is {limit_s:.3g} s: {found.wait_s:.3g} s until what waits before it has gone{drains}, then "
            f"{found.service_s:.3g} s of service",
            retry_after_s=min(MOST_RETRY_S, max(1.0, math.ceil(found.least_s - limit_s))),
        )

    def _tries(self, number: int, now_s: float) -> bool:
        """Whether one may try, for nothing was answered lately."""
        if number == self._trying:
            return True
        dark_s = max(DARK_S, 2 * max(self._calm.usual_s, self._busy.usual_s))
        heard_s = max(self._calm.measured_s, self._busy.measured_s, self._tried_s)
        if now_s - heard_s <= dark_s:
            return False
        self._tried_s, self._trying = now_s, number
        return True

    def _over_share(self, tenant: str, nbytes: int) -> int | None:
        """The newest request of the tenant most over its share, None: this one's would be, or none is."""
        gate = self.gate
        if gate.over_share(tenant, max(1, nbytes)) > 1:
            return None
        others = [(gate.over_share(other, 0, tenant), other) for other in gate.tenants if other != tenant]
        for over, other in sorted(others, reverse=True):
            if over <= 1:
                return None
            newest = self.queue.newest(other)
            if newest is not None:
                return newest
        return None

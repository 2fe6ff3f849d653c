"""Who goes next of those that wait: fair shares among tenants, and classes of priority. Pure.

Under `admission`, which counts and predicts. Start-time fair queueing (Goyal, Vin, Cheng 1996) on two levels:
three classes of priority share by `CLASS_WEIGHTS`, and within a class the tenants by their weights; cost is
work (tokens, or items). Selection needs no cost, so a request's own is charged when it goes. The difference
of what two tenants that both wait got, each over its weight, is at most one request of each.

Classes are weighted and not strict: under a flood of urgent requests ordinary ones keep a fifth and low
ones a twentieth, so nobody starves, and what goes before a request can be computed (`ahead`). Within a tenant
and class the order is the caller's: by `order`, then first come first. What was begun already and lost its
worker waits at the very front.

Costs: `push`, `pop` and `remove` O(log n) (amortised), `ahead` O(tenants that wait).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Iterator

CLASS_WEIGHTS = {-1: 1.0, 0: 4.0, 1: 16.0}
"""Shares of low, normal and high where all three wait."""
_SPARE = 64
"""Entries that were removed and may lie in a heap before it is built anew."""
_REMEMBERED = 1024
"""Tenants without a request of which is known how far ahead of the others they are."""


@dataclasses.dataclass(slots=True)
class Waiter:
    """A request that waits.

    Attributes:
        number: of the request.
        tenant: whose share it counts on.
        priority: -1, 0 or 1.
        cost: its work, above 0.
        order: place within its tenant and class, smaller first.
    """

    number: int
    tenant: str
    priority: int
    cost: float
    order: float = 0.0


class _Flow:
    """What waits of one tenant in one class."""

    __slots__ = ("cost", "heap", "last_order", "live", "start", "tenant")

    def __init__(self, tenant: str, start: float) -> None:
        self.tenant = tenant
        self.start = start
        self.cost = 0.0
        self.live: dict[int, Waiter] = {}
        self.heap: list[tuple[float, int, int]] = []
        self.last_order = -float("inf")

    def push(self, waiter: Waiter, sequence: int) -> None:
        self.live[waiter.number] = waiter
        self.cost += waiter.cost
        self.last_order = max(self.last_order, waiter.order)
        heapq.heappush(self.heap, (waiter.order, sequence, waiter.number))

    def head(self) -> Waiter:
        while self.heap[0][2] not in self.live:
            heapq.heappop(self.heap)
        return self.live[self.heap[0][2]]

    def take(self, number: int) -> Waiter:
        waiter = self.live.pop(number)
        self.cost = self.cost - waiter.cost if self.live else 0.0
        if len(self.heap) > 2 * len(self.live) + _SPARE:
            self.heap = [entry for entry in self.heap if entry[2] in self.live]
            heapq.heapify(self.heap)
        return waiter

    def before(self, order: float) -> float:
        """Work of those that go before a newcomer."""
        if order >= self.last_order:
            return self.cost
        return sum(waiter.cost for waiter in self.live.values() if waiter.order <= order)


class _Class:
    """The tenants that wait in one class."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.start = 0.0
        self.now = 0.0
        self.cost = 0.0
        self.flows: dict[str, _Flow] = {}
        self.heap: list[tuple[float, int, _Flow]] = []
        self.finished: dict[str, float] = {}

    def flow(self, tenant: str, sequence: int) -> _Flow:
        flow = self.flows.get(tenant)
        if flow is None:
            start = max(self.now, self.finished.pop(tenant, 0.0))
            flow = self.flows[tenant] = _Flow(tenant, start)
            heapq.heappush(self.heap, (start, sequence, flow))
        return flow

    def next_flow(self) -> _Flow:
        while self.flows.get((flow := self.heap[0][2]).tenant) is not flow:
            heapq.heappop(self.heap)
        return flow

    def charge(self, flow: _Flow, cost: float, weight: float, sequence: int) -> None:
        """The first of a flow, which is the next one, goes; it has been taken."""
        self.now = flow.start
        heapq.heappop(self.heap)
        flow.start += cost / weight
        if flow.live:
            heapq.heappush(self.heap, (flow.start, sequence, flow))
        else:
            self.end(flow)

    def end(self, flow: _Flow) -> None:
        """Nothing of a tenant waits any more."""
        del self.flows[flow.tenant]
        if flow.start > self.now:
            self.finished[flow.tenant] = flow.start
        if len(self.heap) > 2 * len(self.flows) + _SPARE:
            self.heap = [entry for entry in self.heap if self.flows.get(entry[2].tenant) is entry[2]]
            heapq.heapify(self.heap)
        if len(self.finished) > _REMEMBERED:
            self.finished = {tenant: at for tenant, at in self.finished.items() if at > self.now}


class FairQueue:
    """Requests that wait, by number.

    Args:
        weight_of: of a tenant, above 0; asked again whenever one of its requests goes.
    """

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._classes = {priority: _Class(weight) for priority, weight in CLASS_WEIGHTS.items()}
        self._waiters: dict[int, Waiter] = {}
        self._front: deque[Waiter] = deque()
        self._front_cost = 0.0
        self._sequence = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, number: int) -> bool:
        return number in self._waiters

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiters)

    @property
    def cost(self) -> float:
        """Work of all that wait."""
        return self._front_cost + sum(of_class.cost for of_class in self._classes.values())

    def push(self, waiter: Waiter) -> None:
        """A new request waits."""
        assert waiter.number not in self._waiters
        assert waiter.cost > 0
        self._waiters[waiter.number] = waiter
        self._sequence += 1
        of_class = self._classes[waiter.priority]
        if not of_class.flows:
            of_class.start = max(of_class.start, self._now)
        of_class.cost += waiter.cost
        of_class.flow(waiter.tenant, self._sequence).push(waiter, self._sequence)

    def push_front(self, waiter: Waiter) -> None:
        """One that was begun waits again, before all others; it was charged when it went first."""
        assert waiter.number not in self._waiters
        self._waiters[waiter.number] = waiter
        self._front.appendleft(waiter)
        self._front_cost += waiter.cost

    def peek(self) -> int | None:
        """The next one, None: nobody waits."""
        if self._front:
            return self._front[0].number
        of_class = self._next_class()
        return None if of_class is None else of_class.next_flow().head().number

    def pop(self) -> Waiter:
        """Takes the next one.

        Raises:
            IndexError: nobody waits.
        """
        if self._front:
            waiter = self._front.popleft()
            self._front_cost = self._front_cost - waiter.cost if self._front else 0.0
            del self._waiters[waiter.number]
            return waiter
        of_class = self._next_class()
        if of_class is None:
            raise IndexError("nobody waits")
        flow = of_class.next_flow()
        waiter = flow.take(flow.head().number)
        del self._waiters[waiter.number]
        self._sequence += 1
        of_class.charge(flow, waiter.cost, self._weight_of(waiter.tenant), self._sequence)
        of_class.cost = of_class.cost - waiter.cost if of_class.flows else 0.0
        self._now = of_class.start
        of_class.start += waiter.cost / of_class.weight
        return waiter

    def remove(self, number: int) -> Waiter:
        """Takes one that waits no longer; nobody is charged for it.

        Raises:
            KeyError: it does not wait.
        """
        waiter = self._waiters.pop(number)
        if waiter in self._front:
            self._front.remove(waiter)
            self._front_cost = self._front_cost - waiter.cost if self._front else 0.0
            return waiter
        of_class = self._classes[waiter.priority]
        flow = of_class.flows[waiter.tenant]
        flow.take(number)
        if not flow.live:
            of_class.end(flow)
        of_class.cost = of_class.cost - waiter.cost if of_class.flows else 0.0
        return waiter

    def tenant_of(self, number: int) -> str:
        """Whose a request is that waits."""
        return self._waiters[number].tenant

    def newest(self, tenant: str) -> int | None:
        """The tenant's newest request of the lowest class, None: none waits but those at the front."""
        for priority in sorted(self._classes):
            flow = self._classes[priority].flows.get(tenant)
            if flow is not None:
                return next(reversed(flow.live))
        return None

    def ahead(self, waiter: Waiter) -> float:
        """Work that goes before one that is about to wait, if nobody comes after it.

        While a tenant's work m goes, each other one gets m times the ratio of their weights, or all it has.
        """
        of_class = self._classes[waiter.priority]
        own = of_class.flows.get(waiter.tenant)
        mine = own.before(waiter.order) if own is not None else 0.0
        ratio = (mine + waiter.cost) / self._weight_of(waiter.tenant)
        work = mine
        for flow in of_class.flows.values():
            if flow is not own:
                work += min(flow.cost, ratio * self._weight_of(flow.tenant))
        ratio = (work + waiter.cost) / of_class.weight
        others = (other for other in self._classes.values() if other is not of_class)
        return self._front_cost + work + sum(min(o.cost, ratio * o.weight) for o in others)

    def _next_class(self) -> _Class | None:
        """The class with the earliest start; of equal ones the higher."""
        waiting = [(c.start, -priority) for priority, c in self._classes.items() if c.flows]
        return self._classes[-min(waiting)[1]] if waiting else None

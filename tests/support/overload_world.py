"""A pipeline under overload without any IO: arrivals come to an `Entrance`, servers take turns.

Servers are slots, as sessions of a looping pipeline hold them for their whole life. Time is drawn.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator

from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.engine import DeadlineUnreachable, QueueFull
from keystage.router.entrance import Entrance
from keystage.router.fair_queue import Waiter

WARM_S = 10.0


@dataclasses.dataclass(slots=True)
class Asked:
    """One request and what became of it: `end_s` when it was answered, or why it was not.

    `would_end_s` is when it would have been answered, had it been admitted and nobody after it.
    """

    number: int
    at_s: float
    service_s: float
    limit_s: float
    tenant: str = ""
    end_s: float | None = None
    refused: str = ""
    would_end_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Answered in time."""
        return self.end_s is not None and self.end_s <= self.at_s + self.limit_s


class Slots:
    """So many sessions at once, each for its own time.

    Args:
        slots: servers.
        bounds: admission bounds.
        now_s: start of time.
    """

    def __init__(self, slots: int, bounds: AdmissionBounds | None = None) -> None:
        self.gate = Gate(bounds or AdmissionBounds())
        self.entrance = Entrance(self.gate, "tokens")
        self.entrance._slots = (slots,)
        self.slots = slots
        self.running: list[tuple[float, int]] = []
        self.asked: dict[int, Asked] = {}
        self.most_waiting = 0
        """Once the drain rate is known."""

    def run(self, arrivals: Iterator[Asked], *, probes: bool = False) -> list[Asked]:
        """Lives until all are over; with `probes` it is noted when each refused one would have ended."""
        for one in arrivals:
            self._until(one.at_s)
            self.asked[one.number] = one
            waiter = Waiter(one.number, one.tenant, 0, 1.0)
            if probes:
                one.would_end_s = self._would_end_s(one)
            try:
                while gone := self.entrance.enter(waiter, 1, 1.0, one.limit_s, one.at_s):
                    self._refuse(gone[0], gone[1].code)
            except (DeadlineUnreachable, QueueFull) as refusal:
                one.refused = refusal.code
            self._bind(one.at_s)
            if one.at_s > WARM_S:
                self.most_waiting = max(self.most_waiting, len(self.entrance))
        self._until(float("inf"))
        return list(self.asked.values())

    def _would_end_s(self, one: Asked) -> float:
        """By list scheduling of what is there, first come first served."""
        free = [end_s for end_s, _ in self.running] + [one.at_s] * (self.slots - len(self.running))
        heapq.heapify(free)
        for number in self.entrance.queue:
            heapq.heappush(free, heapq.heappop(free) + self.asked[number].service_s)
        return heapq.heappop(free) + one.service_s

    def _until(self, now_s: float) -> None:
        while self.running and self.running[0][0] <= now_s:
            end_s, number = heapq.heappop(self.running)
            self.asked[number].end_s = end_s
            self.entrance.ended(number, end_s)
            self._bind(end_s)

    def _bind(self, now_s: float) -> None:
        while len(self.running) < self.slots and (number := self.entrance.queue.peek()) is not None:
            one = self.asked[number]
            left_s = one.at_s + one.limit_s - now_s
            if self.entrance.is_hopeless(1.0, left_s, one.limit_s, now_s):
                self._refuse(number, "deadline_exceeded")
                continue
            self.entrance.begin(1.0, now_s)
            self.gate.leave(1, one.tenant)
            heapq.heappush(self.running, (now_s + one.service_s, number))

    def _refuse(self, number: int, code: str) -> None:
        one = self.asked[number]
        one.refused = code
        self.entrance.leave(number)
        self.gate.leave(1, one.tenant)


def arrivals(
    rate_rps: float,
    seconds: float,
    gap_s: Callable[[], float],
    service_s: Callable[[], float],
    limit_s: Callable[[], float],
    tenants: Callable[[], str] = str,
) -> Iterator[Asked]:
    """Draws requests; `gap_s` has mean 1."""
    at_s, number = 0.0, 0
    while at_s < seconds:
        at_s += gap_s() / rate_rps
        yield Asked(number, at_s, service_s(), limit_s(), tenants())
        number += 1

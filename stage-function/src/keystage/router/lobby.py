"""Requests of single-pass pipelines and stream programs that wait before the batch queues. Pure.

Between `admission` and the batch scheduler. Which requests make a batch is the scheduler's word; whose turn
it is among tenants is not. So it is shown no more than it can make use of: what the workers hold, two batches
each at least. The rest waits here, in the order of fair shares, and within a tenant in the scheduler's own
order, so that one that is hidden is never due before one that is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from keystage.router.admission import Gate, short_of_time
from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import Caller, QueueFull, TooLate
from keystage.router.entrance import ERROR_RATIO, Entrance
from keystage.router.fair_queue import Waiter
from keystage.router.fleet import Fleet, Worker

BATCHES_EACH = 2
"""Batches inside for each worker: one that it computes, one that gathers or is sent ahead."""


class Request(Protocol):
    """What the lobby asks of a request."""

    number: int
    arrived_s: float
    deadline_s: float
    due_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Guest:
    tenant: str
    nbytes: int
    arrived_s: float
    limit_s: float


class Lobby(Entrance):
    """Who waits, and how many are inside.

    Args:
        gate: bounds of all, inside and waiting.
        unit: what requests are called in refusals.
        settings: which deadline counts for whom.
        apart: whether a worker runs its stages one at a time, each with batches of its own.
    """

    def __init__(self, gate: Gate, unit: str, settings: BatchSettings, *, apart: bool) -> None:
        super().__init__(gate, unit)
        self._apart = apart
        self._settings = settings
        self._room = 0
        self._inside = 0
        self._now_s = 0.0
        self._behind: set[int] = set()
        self._guests: dict[int, _Guest] = {}

    def adapt(self, fleet: Fleet) -> None:
        """The workers or their credit may have changed."""
        super().adapt(fleet)
        self._room = sum(map(self._room_at, fleet.workers.values()))

    def _room_at(self, worker: Worker) -> int:
        batches = BATCHES_EACH * (len(worker.hello.stages) if self._apart else 1)
        return max(worker.granted_slots, batches * worker.hello.max_batch) if worker.is_ready else 0

    def submit(self, request: Request, nbytes: int, caller: Caller) -> tuple[int, QueueFull] | None:
        """As `enter`, for one that arrives now and is one unit of work."""
        arrived_s, settings = request.arrived_s, self._settings
        self._now_s = arrived_s
        limit_s = settings.limit_s(arrived_s, request.deadline_s, request.due_s)
        order_s = settings.order_s(request.due_s, arrived_s)
        waiter = Waiter(request.number, caller.tenant, caller.priority, 1.0, order_s)
        gone = self.enter(waiter, nbytes, 1.0, limit_s, arrived_s)
        if gone is None:
            self._guests[request.number] = _Guest(caller.tenant, nbytes, arrived_s, limit_s)
        return gone

    def turns(self, now_s: float) -> Iterator[tuple[int, TooLate | None]]:
        """Whose turn it is, while there is room inside: those who come in, or why they are to be refused."""
        while self._inside - len(self._behind) < self._room and (number := self.queue.peek()) is not None:
            guest = self._guests[number]
            left_s = guest.arrived_s + guest.limit_s - now_s
            if self.is_hopeless(1.0, left_s, guest.limit_s, now_s):
                yield number, short_of_time(left_s, guest.limit_s)
                assert number not in self._guests
            else:
                self._inside += 1
                self.begin(1.0, now_s)
                yield number, None

    def alone_s(self, length: float) -> float:
        """As long as those inside take (Little's law), 0: nothing is known of that."""
        rate = self.drain.per_s(self._now_s)
        return (1 - ERROR_RATIO) * (self._inside - len(self._behind)) / rate if rate else 0.0

    def _left(self, work: float, now_s: float, *, is_more: bool) -> None:
        """What comes in says nothing of what the workers can do: see `goes`."""

    def _emptied(self) -> None:
        """The same."""

    def steps_behind(self, number: int) -> None:
        """One inside waits until nobody else does: it takes no room."""
        self._behind.add(number)

    def goes_on(self, number: int) -> None:
        """One inside is served."""
        self._behind.discard(number)

    def goes(self, number: int, answered_s: float | None = None) -> None:
        """One is over, wherever it was; `answered_s`: when it was answered."""
        guest = self._guests.pop(number)
        self.gate.leave(guest.nbytes, guest.tenant)
        if number in self.queue:
            self.leave(number)
            return
        self._inside -= 1
        self._behind.discard(number)
        self.ended(number, answered_s)
        if answered_s is not None:
            # With a full batch for every worker they do what they can.
            self._now_s = answered_s
            super()._left(1.0, answered_s, is_more=2 * self._inside >= self._room)

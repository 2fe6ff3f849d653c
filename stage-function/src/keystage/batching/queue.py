"""The requests of one model that wait, in deadline order. Pure.

`ModelSide` fills it, a `BatchPolicy` looks at it and gives up what cannot make it, a dispatched batch leaves
from its front. Behind all that can still be in time stand the demoted ones: their deadlines do not count any
more. The queue decides nothing: what is hopeless is the policy's word.
"""

from __future__ import annotations

import bisect
import collections

from keystage.batching.api import Request
from keystage.batching.surroundings import Surroundings

_COMPACT = 64
"""Places at the front that may lie empty before the list is cut; below this cutting costs more."""


def _deadline_s(request: Request) -> float:
    return request.deadline_s


class RequestQueue:
    """Deadline order, first come first among equal ones; then the demoted, in the order they were demoted.

    Arrivals of one model mostly come in deadline order, so a push is an append; one that comes back late is
    put where it belongs. `len` counts all, the demoted included.

    Attributes:
        around: what a policy may know beyond the queue; None where nobody keeps it.
        head: the request of the earliest deadline that counts; to be read only.
        has_given_up: whether `take_given_up` would return any.
    """

    __slots__ = ("_demoted", "_first", "_given_up", "_items", "around", "has_given_up", "head")

    def __init__(self, around: Surroundings | None = None) -> None:
        self.around = around
        self.head: Request | None = None
        self._items: list[Request] = []
        self._first = 0
        self._demoted: collections.deque[Request] = collections.deque()
        self._given_up: list[Request] = []
        self.has_given_up = False

    def __len__(self) -> int:
        return len(self._items) - self._first + len(self._demoted)

    @property
    def in_time(self) -> int:
        """Requests whose deadlines count."""
        return len(self._items) - self._first

    @property
    def demoted(self) -> int:
        """Requests whose deadlines do not count any more."""
        return len(self._demoted)

    @property
    def first_demoted(self) -> Request | None:
        """The request that was demoted first."""
        return self._demoted[0] if self._demoted else None

    def at(self, place: int) -> Request:
        """The request at a place among those in time, 0 the head.

        Raises:
            IndexError: there is none.
        """
        if not 0 <= place < self.in_time:
            raise IndexError(f"no request at place {place}, {self.in_time} are in time")
        return self._items[self._first + place]

    def first_due(self, by_s: float) -> int:
        """The first place among those in time whose deadline is not before a time; their number if none."""
        return bisect.bisect_left(self._items, by_s, lo=self._first, key=_deadline_s) - self._first

    def push(self, request: Request) -> None:
        """Puts a request at its place by deadline."""
        items = self._items
        if self.head is None:
            items.append(request)
            self.head = request
        elif request.deadline_s >= items[-1].deadline_s:
            items.append(request)
        else:
            bisect.insort_right(items, request, lo=self._first, key=_deadline_s)
            self.head = items[self._first]

    def demote(self, request: Request) -> None:
        """Puts a request behind all others."""
        self._demoted.append(request)

    def pop_front(self, count: int) -> list[Request]:
        """Takes so many from the front, the demoted after those in time; fewer when there are fewer."""
        taken = self._cut(min(count, self.in_time))
        while len(taken) < count and self._demoted:
            taken.append(self._demoted.popleft())
        return taken

    def give_up(self, count: int) -> None:
        """Sets so many from the front apart, for `take_given_up`; demoted ones are never given up."""
        self._given_up += self._cut(min(count, self.in_time))
        self.has_given_up = bool(self._given_up)

    def take_given_up(self) -> list[Request]:
        """What was given up since the last call; forgets it."""
        given_up, self._given_up = self._given_up, []
        self.has_given_up = False
        return given_up

    def remove(self, request: Request) -> bool:
        """Takes one out, wherever it waits. Returns whether it waited here."""
        items = self._items
        place = bisect.bisect_left(items, request.deadline_s, lo=self._first, key=_deadline_s)
        while place < len(items) and items[place].deadline_s == request.deadline_s:
            if items[place] is request:
                del items[place]
                self._set_head()
                return True
            place += 1
        for place, demoted in enumerate(self._demoted):
            if demoted is request:
                del self._demoted[place]
                return True
        return False

    def _cut(self, count: int) -> list[Request]:
        items, first = self._items, self._first
        taken = items[first : first + count]
        first += count
        if first >= len(items):
            items.clear()
            first = 0
        elif first >= _COMPACT and first * 2 >= len(items):
            del items[:first]
            first = 0
        self._first = first
        self._set_head()
        return taken

    def _set_head(self) -> None:
        self.head = self._items[self._first] if self._first < len(self._items) else None

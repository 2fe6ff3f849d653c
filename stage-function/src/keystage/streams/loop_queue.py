"""The queue of a module that messages come back to: who has begun its loop goes before who has not. Pure.

Between a module's input streams and its batch policy (`keystage.batching`), in place of a `RequestQueue`.
In deadline order alone a request that has gained on its schedule stands behind a newcomer that has not: under
more load than the module can carry all are served by turns, and many get late with most of their work done.
NeuStream sorts messages by the request's arrival (section 4.1) for the same end. Within each of the two
groups the order is that of deadlines; a newcomer's deadline says until when it makes sense to begin it.
"""

from __future__ import annotations

import bisect

from keystage.batching.api import Request
from keystage.batching.queue import RequestQueue


class LoopQueue(RequestQueue):
    """A `RequestQueue` whose first places belong to requests pushed by `push_back`."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        super().__init__()
        self._begun: set[int] = set()

    def push_back(self, request: Request) -> None:
        """A request comes back to the module: it stands with those that have begun."""
        self._begun.add(request.number)
        self._insert(request)

    def push(self, request: Request) -> None:
        """A request comes to the module for the first time."""
        self._begun.discard(request.number)
        self._insert(request)

    def remove(self, request: Request) -> bool:
        """Takes one out, wherever it waits. Returns whether it waited here."""
        for place in range(self._first, len(self._items)):
            if self._items[place] is request:
                del self._items[place]
                self._set_head()
                return True
        return super().remove(request)

    def _cut(self, count: int) -> list[Request]:
        taken = super()._cut(count)
        self._begun.difference_update(request.number for request in taken)
        return taken

    def _insert(self, request: Request) -> None:
        bisect.insort_right(self._items, request, lo=self._first, key=self._order)
        self._set_head()

    def _order(self, request: Request) -> tuple[bool, float]:
        return request.number not in self._begun, request.deadline_s

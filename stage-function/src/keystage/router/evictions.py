"""State of stream programs that workers are to forget, gathered by worker. Pure.

Before it: `program` says that a request has left a loop, has ended or starts over. After it: one `Evict` a
worker goes out before anything new is given to it.
"""

from __future__ import annotations

from keystage.router.fleet import Fleet
from keystage.wire import api


class Evictions:
    """Entries by worker."""

    def __init__(self) -> None:
        self._of: dict[str, list[tuple[int, int, int]]] = {}

    def add(self, address: str, number: int, epoch: int, stage: int) -> None:
        """A worker is to forget a request's state of one module, -1 for all."""
        self._of.setdefault(address, []).append((number, epoch, stage))

    def take(self, fleet: Fleet) -> list[tuple[str, api.Message]]:
        """One message for each worker that lives; forgets them."""
        taken: list[tuple[str, api.Message]] = []
        for address, entries in self._of.items():
            if address in fleet.workers:
                numbers, epochs, stages = zip(*entries, strict=True)
                taken.append((address, api.Evict(list(numbers), list(epochs), list(stages))))
        self._of.clear()
        return taken

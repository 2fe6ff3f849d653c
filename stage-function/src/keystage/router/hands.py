"""What the workers of a single-pass pipeline have in hand: batches that were sent and not reported yet. Pure.

Before it: `binding` sends a batch. After it: `binding` hears of its end here, once the worker has reported
all of its items, whether they still exist or were cancelled meanwhile. A worker that has nothing in hand is
idle.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from keystage.router.fleet import Fleet


@dataclasses.dataclass(slots=True)
class Batch:
    """A batch at a worker.

    Attributes:
        address: the worker.
        stage: first stage of its run.
        last: last stage.
        size: items in it when it was sent.
        sent_s: when.
        left: items, with epoch, of which the worker has not reported yet.
    """

    address: str
    stage: int
    last: int
    size: int
    sent_s: float
    left: set[tuple[int, int]]


class Hands:
    """Batches by worker and by item.

    Args:
        fleet: the workers, which count their idle time.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._of: dict[str, deque[Batch]] = {}
        self._by_key: dict[tuple[int, int], Batch] = {}

    def give(self, batch: Batch) -> None:
        """A batch is sent."""
        self._of.setdefault(batch.address, deque()).append(batch)
        self._by_key.update(dict.fromkeys(batch.left, batch))
        self._fleet.workers[batch.address].works(batch.sent_s)

    def reported(self, key: tuple[int, int], now_s: float) -> Batch | None:
        """A worker is done with an item (number, epoch); the batch that has ended with it, None for none."""
        batch = self._by_key.pop(key, None)
        if batch is None:
            return None
        batch.left.discard(key)
        if batch.left:
            return None
        hand = self._of[batch.address]
        hand.remove(batch)
        if not hand:
            self._fleet.workers[batch.address].rests(now_s)
        return batch

    def lost(self, address: str) -> int:
        """The worker is gone, with all it had; returns how many items."""
        had = 0
        for batch in self._of.pop(address, ()):
            had += len(batch.left)
            for key in batch.left:
                del self._by_key[key]
        return had

    def is_empty(self, address: str) -> bool:
        """Whether a worker has nothing."""
        return not self._of.get(address)

    def has_stage(self, stage: int) -> bool:
        """Whether a batch that begins with this stage is under way."""
        return any(batch.stage == stage for hand in self._of.values() for batch in hand)

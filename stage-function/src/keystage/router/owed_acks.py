"""Acknowledgements that consumers owe producers: the router gives them for a consumer that dies. Pure.

A consumer acknowledges what it fetched once it has run the batch, and gathers acknowledgements for a while.
If it dies before, nobody else knows of the producer's slots. Used by the cores that bind late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from keystage.router.fleet import DEAD_AFTER_S

ACK_GRACE_S = DEAD_AFTER_S + 1.0
"""A worker gathers acknowledgements for some 20 ms; one that died before it sent them owes them, and on
another node its death is noticed by its silence only."""

Slot: TypeAlias = tuple[str, int]
"""Producer and ring slot."""


class OwedAcks:
    """Who owes whom."""

    def __init__(self) -> None:
        self._fetched: dict[Hashable, tuple[str, tuple[Slot, ...]]] = {}
        # The same with its time once the consumer reported: its Ack follows within `ACK_GRACE_S`.
        self._consumed: deque[tuple[float, str, tuple[Slot, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._fetched)

    def fetched(self, key: Hashable, consumer: str, slots: Sequence[Slot]) -> None:
        """A consumer is told to fetch these; `key` names the work they are for."""
        if slots:
            self._fetched[key] = consumer, tuple(slots)

    def reported(self, key: Hashable, now_s: float) -> None:
        """The consumer ran that work, and acknowledges its inputs soon."""
        hop = self._fetched.pop(key, None)
        if hop is not None:
            self._consumed.append((now_s, *hop))

    def pass_time(self, now_s: float) -> None:
        """Forgets what was acknowledged long ago."""
        while self._consumed and self._consumed[0][0] < now_s - ACK_GRACE_S:
            self._consumed.popleft()

    def died(self, address: str) -> list[Slot]:
        """A worker died: the slots that it owed, for whose producers the router is to free them."""
        owed = {slot for _, consumer, slots in self._consumed if consumer == address for slot in slots}
        for key, (consumer, slots) in list(self._fetched.items()):
            if consumer == address:
                owed.update(slots)
                del self._fetched[key]
            else:
                # Another process may use the address, and the same slots, before this consumer dies.
                self._fetched[key] = consumer, tuple(slot for slot in slots if slot[0] != address)
        return sorted(slot for slot in owed if slot[0] != address)

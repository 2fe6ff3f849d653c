"""One replica as the ledger keeps it, and which of several go first.

Pure; changed by `local.ledger` alone. It must not decide that one goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from keystage.local.api import ReplicaRecord, ReplicaState


@dataclasses.dataclass(slots=True)
class Replica:
    """What the ledger knows of a replica beyond its record."""

    record: ReplicaRecord
    number: int
    drain_s: float
    is_plain: bool
    """Foreign: it may end on SIGTERM whatever it is doing, and may be silent while it computes."""
    misses: int = 0
    retry_at_s: float = 0.0
    drain_since_s: float = 0.0
    terminated: bool = False
    fault: str = ""
    """Why we killed it, when we did."""

    @property
    def state(self) -> ReplicaState:
        """Its record's state."""
        return self.record.state

    def set(self, **changes: object) -> None:
        """Changes its record."""
        self.record = msgspec.structs.replace(self.record, **changes)


def first_to_go(replicas: list[Replica], count: int, named: Sequence[str] = ()) -> list[Replica]:
    """Picks who goes: failed ones, then those named, then starting ones, then the youngest."""
    place = {name: n for n, name in enumerate(named)}

    def rank(replica: Replica) -> tuple[int, int]:
        if replica.state == "failed":
            return 0, -replica.number
        if replica.record.replica in place:
            return 1, place[replica.record.replica]
        return 2 if replica.state == "starting" else 3, -replica.number

    ranked = sorted(replicas, key=rank)
    return ranked[: max(0, count)]

"""Messages of stream programs that rest at their producers, and who frees what nobody takes. Pure.

Before it: `program` hands on what a turn has made. After it: a consumer is sent to fetch a message (`take`),
or its producer is told that nobody will (`drop`).
"""

from __future__ import annotations

from collections.abc import Iterable

from keystage.router.fleet import Fleet
from keystage.router.turns import Parcel
from keystage.wire import api


class Resting:
    """Messages at rest.

    Args:
        fleet: the workers; one that is gone is told nothing.

    Attributes:
        nbytes: bytes of all of them.
        acks: what is to be sent to producers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._nbytes: dict[Parcel, int] = {}
        self.nbytes = 0
        self.acks: list[tuple[str, api.Message]] = []

    def __len__(self) -> int:
        return len(self._nbytes)

    def add(self, parcel: Parcel) -> None:
        """A message rests at its producer; one without tensors takes nothing there."""
        ref = parcel.message.ref
        if ref is not None:
            self._nbytes[parcel] = ref.nbytes
            self.nbytes += ref.nbytes

    def take(self, parcel: Parcel) -> None:
        """A consumer is sent to fetch it."""
        self.nbytes -= self._nbytes.pop(parcel, 0)

    def drop(self, parcel: Parcel) -> None:
        """Nobody will use this message; what a consumer was sent to fetch, it acknowledges itself."""
        nbytes = self._nbytes.pop(parcel, None)
        if nbytes is not None and parcel.message.ref is not None:
            self.nbytes -= nbytes
            self.free(parcel.message.producer, parcel.message.ref.slot)

    def discard(self, outputs: Iterable[api.StreamMessage], address: str) -> None:
        """Nobody wants what a worker has made."""
        for output in outputs:
            if output.ref is not None:
                self.free(address, output.ref.slot)

    def free(self, producer: str, slot: int) -> None:
        """A producer's slot is its own again."""
        if producer in self._fleet.workers:
            self.acks.append((producer, api.Ack([slot])))

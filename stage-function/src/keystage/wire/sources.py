"""Where the engine gets the tensors that messages name: out of a ring, or over the network.

Before it: a message with `TensorRef`s and the address of their producer. After it: the executor reads
the bytes; `release` with the slot's `Ack` ends that. A producer on this node is read where it lies
(`ring.PeerRings`); one on another node is asked over its tensor connection, while the engine goes on with
other work. A ring is never opened on the word of another node, where its process ids mean nothing.

All methods belong to the engine's thread; only `_arrived` is called by others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from keystage.wire.address import Address, parse
from keystage.wire.api import TensorRef
from keystage.wire.checksums import NONE, Checker
from keystage.wire.errors import WireError
from keystage.wire.link import Link
from keystage.wire.ring import PeerRings, RingError, RingWatcher
from keystage.wire.tensor_fetch import Arrival, Fetcher, check_size


class TensorSources:
    """Tensors of every producer.

    Args:
        link: own node and keys; None: there is one node only.

    Attributes:
        checker: compares tensors with the checksums that they come with.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._link = link or Link()
        self._rings = PeerRings()
        self.checker = Checker()
        # Producers of other nodes; None for those of this one. Asked for every tensor.
        self._remote: dict[str, Address | None] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._arrivals: dict[tuple[str, int], Arrival] = {}
        self._waiting: dict[Arrival, Callable[[], None]] = {}
        # What arrived and the wake-up for it change together: none is lost, none is left over.
        self._lock = threading.Lock()
        self._new: list[Arrival] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if self._link.secret else None

    @property
    def fd(self) -> int | None:
        """Readable when `poll` has something to do; None when that never happens."""
        return self._wake

    def watch_rings(self, watcher: RingWatcher) -> None:
        """See `PeerRings.watch`."""
        self._rings.watch(watcher)

    def begin(self, refs: Sequence[TensorRef], owners: Sequence[str], ready: Callable[[], None]) -> bool:
        """Begins to bring what lies on other nodes.

        Args:
            refs: the tensors of one piece of work.
            owners: address of each one's producer.
            ready: called by `poll` once all of them are here, or have failed.

        Returns:
            False when nothing has to be brought: `view` answers at once and `ready` is not called.
        """
        coming = [
            self._order(ref, owner, remote)
            for ref, owner in zip(refs, owners, strict=True)
            if (remote := self._remote_of(owner)) is not None
        ]
        if not coming:
            return False
        left = len(coming)

        def one() -> None:
            nonlocal left
            left -= 1
            if not left:
                ready()

        for arrival in coming:
            self._waiting[arrival] = one
        return True

    def poll(self) -> None:
        """Tells of what has arrived since; cheap when nothing has."""
        if not self._new:
            return
        with self._lock:
            new, self._new = self._new, []
            if self._wake is not None:
                os.eventfd_read(self._wake)
        for arrival in new:
            ready = self._waiting.pop(arrival, None)
            if ready is not None:
                ready()

    def view(self, ref: TensorRef, owner: str) -> memoryview:
        """The bytes that a reference names; valid until `release`.

        Raises:
            RingError: they cannot be had, or are not what was sent: names the producer and the reason.
        """
        data = self._bytes_of(ref, owner)
        return data if ref.checksum == NONE else self.checker.checked(ref, data, owner)

    def _bytes_of(self, ref: TensorRef, owner: str) -> memoryview:
        if self._remote_of(owner) is None:
            return self._rings.view(ref, owner)
        arrival = self._arrivals.get((owner, ref.slot))
        if arrival is None or not arrival.is_done:
            raise RingError(f"tensor in slot {ref.slot} of {owner} was not fetched")
        if arrival.data is None:
            raise RingError(f"tensor in slot {ref.slot} of {owner}: {arrival.reason}")
        return arrival.data

    def release(self, ref: TensorRef, owner: str) -> None:
        """The tensor was used up, or is not wanted any more."""
        arrival = self._arrivals.pop((owner, ref.slot), None)
        if arrival is not None and arrival.is_done and owner in self._fetchers:
            self._fetchers[owner].recycle(arrival)

    def forget(self, owner: str) -> None:
        """A producer died: its mapping is dropped; what was on its way fails."""
        self._rings.forget(owner)
        fetcher = self._fetchers.pop(owner, None)
        if fetcher is not None:
            fetcher.close()
        self._remote.pop(owner, None)

    def _remote_of(self, owner: str) -> Address | None:
        """The producer's address if it is on another node, else None."""
        try:
            return self._remote[owner]
        except KeyError:
            pass
        try:
            parts = parse(owner)
        except WireError:
            parts = Address()  # a name that no mailbox could send to: whoever uses it is in this process
        found = self._remote[owner] = None if parts.is_on(self._link.node) else parts
        return found

    def _order(self, ref: TensorRef, owner: str, remote: Address) -> Arrival:
        arrival = self._arrivals[owner, ref.slot] = Arrival(ref)
        reason = check_size(ref)
        if reason is None and not remote.tensors:
            reason = "it is on another node and has no tensor port (its KEYSTAGE_WIRE_HOST is not set)"
        if reason is None and self._link.secret is None:
            reason = "it is on another node, and KEYSTAGE_WIRE_KEY_FILE is not set here"
        if reason is not None:
            arrival.reason, arrival.is_done = f"refused: {reason}", True
            self._arrived(arrival)
            return arrival
        fetcher = self._fetchers.get(owner)
        if fetcher is None:
            fetcher = self._fetchers[owner] = Fetcher(remote.tensors, self._link, self._arrived)
        fetcher.order(arrival)
        return arrival

    def _arrived(self, arrival: Arrival) -> None:
        with self._lock:
            self._new.append(arrival)
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

"""Messages with tensors: into the ring if there is room, else kept back until an `Ack` makes room.

While something is kept back the engine runs nothing more: a full ring is back-pressure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from keystage.wire import api
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring
from keystage.worker.executor import Activation

ACK_BATCH = 16
"""Acknowledgements gathered for one peer: a message costs more CPU than a small wave's compute."""

CARRIED_BYTES = 64 * 1024
"""Up to this size a tensor goes to another node with its message, under CURVE: fetching it takes threads
and a round trip more. Measured over loopback, 16 KiB: 295 us with the message, 386 (plain) and 452 (TLS)
fetched; 1 MiB: 2,449 us with the message, 803 and 2,190 fetched."""

BuildMessage = Callable[[api.TensorRef], api.Message]


class TensorOutbox:
    """Sends through one mailbox and one ring.

    Args:
        mailbox: the worker's mailbox.
        ring: the worker's ring.
    """

    def __init__(self, mailbox: Mailbox, ring: Ring) -> None:
        self._mailbox = mailbox
        self._ring = ring
        self._kept: deque[tuple[str, Activation, BuildMessage]] = deque()
        self._slots_of: dict[str, set[int]] = {}
        self._peer_of: dict[int, str] = {}
        self._owed: dict[str, list[int]] = {}

    @property
    def address(self) -> str:
        """The worker's own inbox address."""
        return self._mailbox.address

    @property
    def is_blocked(self) -> bool:
        """Whether tensors wait for room in the ring."""
        return bool(self._kept)

    def send(self, to: str, message: api.Message) -> None:
        """Sends a message without a tensor."""
        self._mailbox.send(to, message)

    def push(self, to: str, activation: Activation, build: BuildMessage) -> None:
        """Sends a tensor and the message that names it, now or as soon as the ring has room.

        A tensor larger than the whole ring travels in the message itself.
        """
        if self._kept or not self._try(to, activation, build):
            # The activation may be a view of a buffer that the next step overwrites.
            kept = Activation(activation.dtype, activation.shape, memoryview(bytes(activation.data)))
            self._kept.append((to, kept, build))

    def fits(self, activation: Activation) -> bool:
        """Whether the ring, when empty, has room for the tensor."""
        return self._ring.ledger.fits(activation.data.nbytes)

    def park(self, activation: Activation) -> api.TensorRef | None:
        """Puts a tensor into the ring without telling anybody; None when there is no room."""
        return self._ring.write(activation.data, activation.dtype, activation.shape)

    def flush(self) -> bool:
        """Sends what was kept back; True when nothing is any more."""
        while self._kept:
            to, activation, build = self._kept[0]
            if not self._try(to, activation, build):
                return False
            self._kept.popleft()
        return True

    @property
    def owes(self) -> bool:
        """Whether acknowledgements wait to be sent."""
        return bool(self._owed)

    def taken(self, producer: str, slot: int) -> None:
        """A producer's tensor was used up here: its `Ack` goes out with others of the same peer."""
        owed = self._owed.setdefault(producer, [])
        owed.append(slot)
        if len(owed) >= ACK_BATCH:
            self._mailbox.send(producer, api.Ack(self._owed.pop(producer)))

    def pay(self) -> None:
        """Sends every acknowledgement that waits."""
        for producer, slots in self._owed.items():
            self._mailbox.send(producer, api.Ack(slots))
        self._owed.clear()

    def acknowledge(self, slots: list[int]) -> None:
        """Receivers have taken these tensors."""
        for slot in slots:
            self._ring.ledger.give_back(slot)
            owned = self._slots_of.get(self._peer_of.pop(slot, ""))
            if owned is not None:
                owned.discard(slot)

    def forget(self, peer: str) -> None:
        """A peer died: frees the slots it owned and drops what was kept back for it."""
        self.acknowledge(list(self._slots_of.pop(peer, ())))
        self._owed.pop(peer, None)
        self._kept = deque(entry for entry in self._kept if entry[0] != peer)
        self._mailbox.forget(peer)

    def forget_all(self) -> None:
        """All that is on its way is void: frees every slot a peer owns, drops what was kept back.

        A peer that still reads one computes on bytes of another wave, for a session nobody wants.
        """
        for peer in list(self._slots_of):
            self.acknowledge(list(self._slots_of.pop(peer)))
        self._kept.clear()

    def _try(self, to: str, activation: Activation, build: BuildMessage) -> bool:
        if not self._ring.ledger.fits(activation.data.nbytes):
            inline = api.TensorRef(activation.dtype, activation.shape, 0, 0, 0, activation.data.nbytes, 0)
            self._mailbox.send(to, build(inline), activation.data)
            return True
        ref = self._ring.write(activation.data, activation.dtype, activation.shape)
        if ref is None:
            return False
        self._slots_of.setdefault(to, set()).add(ref.slot)
        self._peer_of[ref.slot] = to
        # The slot is the receiver's all the same: its `Ack` is what bounds tensors on their way.
        is_carried = activation.data.nbytes <= CARRIED_BYTES and not self._mailbox.is_near(to)
        if not self._mailbox.send(to, build(ref), activation.data if is_carried else None):
            self.acknowledge([ref.slot])
        return True

"""Messages with tensors: into the ring if there is room, else kept back until an `Ack` makes room.

While something is kept back the engine runs nothing more: a full ring is back-pressure. A tensor on a
device goes by the worker's `device_lane`, through device memory or the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from keystage.wire import api
from keystage.wire.mailbox import Mailbox
from keystage.wire.ring import Ring
from keystage.worker.device_lane import DeviceLane
from keystage.worker.executor import Activation, AnyActivation, DeviceActivation

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
        lane: of the worker's device, None: its tensors lie in host memory.

    Attributes:
        lane: see above.
    """

    def __init__(self, mailbox: Mailbox, ring: Ring, lane: DeviceLane | None = None) -> None:
        self._mailbox = mailbox
        self._ring = ring
        self.lane = lane
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

    def push(self, to: str, activation: AnyActivation, build: BuildMessage) -> None:
        """Sends a tensor and the message that names it, now or as soon as the ring has room.

        A tensor larger than the whole ring travels in the message itself.
        """
        if self._kept or not self._try(to, activation, build):
            # The activation may be a view of a buffer that the next step overwrites.
            kept = Activation(
                activation.dtype, activation.shape, memoryview(bytes(self.bytes_of(activation)))
            )
            self._kept.append((to, kept, build))

    def fits(self, activation: AnyActivation) -> bool:
        """Whether the ring, when empty, has room for the tensor."""
        return self.fits_bytes(activation.nbytes)

    def fits_bytes(self, nbytes: int) -> bool:
        """Whether the ring, when empty, has room for so many bytes."""
        return self._ring.ledger.fits(nbytes)

    def bytes_of(self, activation: AnyActivation) -> memoryview:
        """A tensor's bytes on the host."""
        if isinstance(activation, Activation):
            return activation.data
        assert self.lane is not None
        return self.lane.host(activation)

    @property
    def slots(self) -> int:
        """Tensors that receivers have not acknowledged."""
        return self._ring.ledger.slots + (self.lane.slots if self.lane is not None else 0)

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
            self._ack(producer, self._owed.pop(producer))

    def pay(self) -> None:
        """Sends every acknowledgement that waits."""
        for producer, slots in self._owed.items():
            self._ack(producer, slots)
        self._owed.clear()

    def _ack(self, producer: str, slots: list[int]) -> None:
        mapped = self.lane.answer(producer) if self.lane is not None else 0
        self._mailbox.send(producer, api.Ack(slots, mapped))

    def acknowledge(self, slots: list[int]) -> None:
        """Receivers have taken these tensors."""
        for slot in slots:
            if slot >= 0:
                self._ring.ledger.give_back(slot)
            elif self.lane is not None:
                self.lane.give_back(slot)
            owned = self._slots_of.get(self._peer_of.pop(slot, ""))
            if owned is not None:
                owned.discard(slot)

    def forget(self, peer: str) -> None:
        """A peer died: frees the slots it owned and drops what was kept back for it."""
        self.acknowledge(list(self._slots_of.pop(peer, ())))
        self._owed.pop(peer, None)
        self._kept = deque(entry for entry in self._kept if entry[0] != peer)
        if self.lane is not None:
            self.lane.forget(peer)
        self._mailbox.forget(peer)

    def forget_all(self) -> None:
        """All that is on its way is void: frees every slot a peer owns, drops what was kept back.

        A peer that still reads one computes on bytes of another wave, for a session nobody wants.
        """
        for peer in list(self._slots_of):
            self.acknowledge(list(self._slots_of.pop(peer)))
        self._kept.clear()

    def _try(self, to: str, activation: AnyActivation, build: BuildMessage) -> bool:
        is_near = self._mailbox.is_near(to)
        ref: api.TensorRef | None = None
        if isinstance(activation, DeviceActivation) and self.lane is not None and is_near:
            ref = self.lane.place(to, activation)
        if ref is None and not self._ring.ledger.fits(activation.nbytes):
            inline = api.TensorRef(activation.dtype, activation.shape, 0, 0, 0, activation.nbytes, 0)
            data = self.bytes_of(activation)
            self._mailbox.send(to, build(self._ring.with_checksum(inline, data)), data)
            return True
        if ref is None:
            ref = self._written(to, activation, is_near=is_near)
        if ref is None:
            return False
        self._slots_of.setdefault(to, set()).add(ref.slot)
        self._peer_of[ref.slot] = to
        # The slot is the receiver's all the same: its `Ack` is what bounds tensors on their way.
        is_carried = activation.nbytes <= CARRIED_BYTES and not is_near
        if not self._mailbox.send(to, build(ref), self.bytes_of(activation) if is_carried else None):
            self.acknowledge([ref.slot])
        return True

    def _written(self, to: str, activation: AnyActivation, *, is_near: bool) -> api.TensorRef | None:
        """A tensor in the ring; None when there is no room at the moment."""
        if isinstance(activation, Activation):
            return self._ring.write(activation.data, activation.dtype, activation.shape)
        assert self.lane is not None
        ref = self._ring.reserve(activation.nbytes, activation.dtype, activation.shape)
        if ref is None:
            return None
        window = self._ring.window(ref.slot, ref.offset, ref.nbytes)
        self.lane.fill(activation, window)
        ref = self._ring.with_checksum(ref, window)
        return msgspec.structs.replace(ref, handle=self.lane.offer(to)) if is_near else ref

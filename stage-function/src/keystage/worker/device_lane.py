"""How tensors leave and enter a device: through memory that another process maps, else through the ring.

Before it: an executor whose output lies on a device. After it: the outbox sends the `TensorRef`; at the
other end `looping` and `handing` ask here for what a reference names. Best way first:

    mapped      the producer copies into an arena on its own device; the consumer has mapped that arena (CUDA
                IPC: the same device, or a peer) and copies from there. Nothing passes through the host.
    pinned      the producer's device copies into a slot of its ring, the consumer's device out of it, both by
                DMA, since both processes have pinned the ring's pages. One copy each way. Pages are pinned
                when it shows that this way is taken: 64 MiB take 50 ms, which no start should.
    pageable    the same where the system pins nothing: the driver stages.

Whether a consumer can map an arena it finds out by trying: tensors in the ring carry the arena's handle
until an `Ack` says yes or no. A producer waits for its copy before it sends, a consumer for its own before
it acknowledges; so no process ever waits for another one's device, and a dead one stops nobody. Pure but
for the driver; no torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
from typing import Protocol

from keystage.wire.api import TensorRef
from keystage.wire.ring import RingError, RingLedger
from keystage.worker.executor import DeviceActivation

log = logging.getLogger(__name__)

_NO_RING = -1
"""Descriptor in a reference to device memory."""


class LaneError(Exception):
    """The driver refused; names the call and why."""


class LaneDriver(Protocol):
    """What a device does for a lane; copies are queued in the order of the calls, behind all compute."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queues a copy between two addresses, of the device, of one that was mapped, or of the host.

        Raises:
            LaneError: it cannot be queued.
        """

    def settle(self) -> None:
        """Waits for everything that was queued.

        Raises:
            LaneError: some of it failed: the device is lost to this process.
        """

    def map(self, handle: bytes) -> int:
        """Maps another process's arena; its address here.

        Raises:
            LaneError: it cannot be mapped from here.
        """

    def unmap(self, address: int) -> None:
        """Ends that."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pins host memory in place.

        Raises:
            LaneError: the system pins nothing, or not so much.
        """

    def unpin(self, address: int) -> None:
        """Ends that."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arena:
    """Device memory that other processes may map.

    Attributes:
        address: of its first byte.
        nbytes: how many.
        handle: by which others map it.
        keep: whatever owns it.
    """

    address: int
    nbytes: int
    handle: bytes
    keep: object


@dataclasses.dataclass(slots=True)
class _Mapped:
    """Another worker's arena: its address here, 0 where it cannot be mapped; whether an `Ack` told it."""

    handle: bytes
    address: int
    is_told: bool = False


class DeviceLane:
    """One worker's device.

    Args:
        driver: of the device.
        arena: memory to hand over through, None: none is to be.
        is_pinning: whether rings are pinned.
    """

    def __init__(self, driver: LaneDriver, arena: Arena | None, *, is_pinning: bool = True) -> None:
        self._driver = driver
        self._arena = arena
        self._is_pinning = is_pinning
        self._ledger = RingLedger(arena.nbytes) if arena is not None else None
        self._peers: dict[str, bool] = {}
        """Consumers, by whether they can map our arena."""
        self._mapped: dict[str, _Mapped] = {}
        self._rings: dict[int, tuple[int, object]] = {}
        """Length and owner of every ring that is mapped here, by address."""
        self._pinned: set[int] = set()
        self._uses_rings = False

    # ------------------------------------------------------------ producer

    @property
    def slots(self) -> int:
        """Slots of the arena that were handed out and not given back."""
        return self._ledger.slots if self._ledger is not None else 0

    def offer(self, peer: str) -> bytes:
        """Handle that goes with a tensor in the ring; empty when there is nothing to be found out."""
        return self._arena.handle if self._arena is not None and peer not in self._peers else b""

    def heard(self, peer: str, mapped: int) -> None:
        """What an `Ack` says of the offer."""
        if mapped and self._arena is not None and self._peers.get(peer) is not (mapped > 0):
            self._peers[peer] = mapped > 0
            if mapped < 0:
                self._use_rings()
            way = "device memory" if mapped > 0 else "host memory: it cannot map this device's"
            log.info("tensors for %s go through %s", peer, way)

    def place(self, peer: str, activation: DeviceActivation) -> TensorRef | None:
        """Copies into the arena, and waits for that; None: not to this consumer, or there is no room.

        Raises:
            LaneError: the device is lost.
        """
        if self._arena is None or self._ledger is None or not self._peers.get(peer):
            return None
        taken = self._ledger.take(activation.nbytes)
        if taken is None:
            return None
        slot, offset = taken
        self._copied_out(self._arena.address + offset, activation)
        return TensorRef(
            activation.dtype, activation.shape, os.getpid(), _NO_RING, offset, activation.nbytes, -slot,
            self._arena.handle,
        )  # fmt: skip

    def fill(self, activation: DeviceActivation, target: memoryview) -> None:
        """Copies to host memory, and waits for that.

        Raises:
            LaneError: the device is lost.
        """
        if self._arena is None:
            self._use_rings()
        if activation.nbytes:
            self._copied_out(_address(target), activation)

    def host(self, activation: DeviceActivation) -> memoryview:
        """Its bytes in new host memory.

        Raises:
            LaneError: the device is lost.
        """
        view = memoryview(bytearray(activation.nbytes))
        self.fill(activation, view)
        return view

    def _copied_out(self, target: int, activation: DeviceActivation) -> None:
        try:
            self._driver.copy(target, activation.address, activation.nbytes)
            self._driver.settle()
        except LaneError as error:
            # Whatever the wave had queued fails here, not where it was queued.
            error.add_note(f"while a tensor of shape {activation.shape} was computed, or sent on")
            raise

    def give_back(self, slot: int) -> bool:
        """Frees a slot of the arena, as `RingLedger.give_back`; slots of the lane are below 0."""
        return self._ledger is not None and self._ledger.give_back(-slot)

    # ------------------------------------------------------------ consumer

    def note(self, ref: TensorRef, producer: str) -> None:
        """A tensor came; if an offer came with it, `answer` has the answer from now on."""
        known = self._mapped.get(producer)
        if not ref.handle:
            if known is None:  # it has no arena
                self._use_rings()
            return
        if known is not None and known.handle == ref.handle:
            return
        self._unmap(producer)
        address = 0
        try:
            if self._arena is None:
                raise LaneError("this worker was told not to (KEYSTAGE_HANDOFF)")
            address = self._driver.map(ref.handle)
            log.info("tensors of %s come through its device memory", producer)
        except LaneError as error:
            log.info("tensors of %s come through host memory: %s", producer, error)
            self._use_rings()
        self._mapped[producer] = _Mapped(ref.handle, address)

    def answer(self, producer: str) -> int:
        """What the next `Ack` says of the producer's offer; see `Ack.mapped`. It is said once."""
        known = self._mapped.get(producer)
        if known is None or known.is_told:
            return 0
        known.is_told = True
        return 1 if known.address else -1

    def open(self, ref: TensorRef, producer: str) -> DeviceActivation:
        """What a reference to a producer's device memory names; valid until its `Ack`.

        Raises:
            RingError: it is not mapped here.
        """
        self.note(ref, producer)
        known = self._mapped.get(producer)
        if known is None or not known.address:
            # Said again: the producer goes back to its ring.
            if known is not None:
                known.is_told = False
            raise RingError(f"device memory of {producer} (process {ref.pid}) cannot be mapped here")
        return DeviceActivation(ref.dtype, ref.shape, ref.nbytes, known.address + ref.offset, known)

    def enter(self, activation: DeviceActivation, target: int) -> None:
        """Queues a copy to an address of this device.

        Raises:
            LaneError: it cannot be queued.
        """
        if activation.nbytes:
            self._driver.copy(target, activation.address, activation.nbytes)

    def settle(self) -> None:
        """Waits until everything that was queued has ended: then what it read may be acknowledged.

        Raises:
            LaneError: the device is lost.
        """
        self._driver.settle()

    # ------------------------------------------------------------ peers and rings

    def forget(self, peer: str) -> None:
        """A peer died, or was started anew."""
        self._peers.pop(peer, None)
        self._unmap(peer)

    def _unmap(self, producer: str) -> None:
        known = self._mapped.pop(producer, None)
        if known is not None and known.address:
            self._driver.settle()
            try:
                self._driver.unmap(known.address)
            except LaneError as error:
                log.warning("device memory of %s stays mapped: %s", producer, error)

    def ring_mapped(self, whole: memoryview) -> None:
        """See `RingWatcher`: a ring, this worker's or another's."""
        owner = ctypes.c_char.from_buffer(whole)
        address = ctypes.addressof(owner)
        self._rings[address] = (whole.nbytes, owner)
        if self._uses_rings:
            self._pin(address)

    def ring_dropped(self, whole: memoryview) -> None:
        """See `RingWatcher`."""
        address = _address(whole)
        self._rings.pop(address, None)
        if address in self._pinned:
            self._pinned.remove(address)
            self._driver.settle()
            try:
                self._driver.unpin(address)
            except LaneError as error:
                log.warning("a ring stays pinned: %s", error)

    def _use_rings(self) -> None:
        """Tensors go through rings, and not only until it is known whether an arena can be mapped."""
        if not self._uses_rings:
            self._uses_rings = True
            for address in self._rings:
                self._pin(address)

    def _pin(self, address: int) -> None:
        nbytes, _ = self._rings[address]
        if not self._is_pinning:
            return
        try:
            self._driver.pin(address, nbytes)
        except LaneError as error:
            log.warning("tensors pass through pageable memory: %d bytes of a ring: %s", nbytes, error)
            self._is_pinning = False
            return
        self._pinned.add(address)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

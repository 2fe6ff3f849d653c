"""Shared-memory ring: how tensors move between processes of one node without a copy through the kernel.

Each producer owns one ring, a memfd that consumers open through `/proc/<pid>/fd/<n>`; so nothing
has a name, and the memory is gone with the last process that maps it. A slot belongs to the
receiver from the message that carries its `TensorRef` until the receiver's `Ack`.

`RingLedger` is the pure accounting (first fit, so that the same warm pages are used again);
`Ring` and `PeerRings` are the thin shell over memfd and mmap.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_left
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from keystage.wire.api import TensorRef
from keystage.wire.errors import WireError

ALIGN_BYTES = 64
_NAME = "keystage-ring"


class RingError(Exception):
    """A reference that cannot be followed: it names the owner and what was found."""


class RingLedger:
    """Which byte ranges of a ring are taken. First fit over a sorted free list, no IO.

    Args:
        capacity_bytes: size of the ring.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < ALIGN_BYTES:
            raise ValueError(f"ring capacity must be at least {ALIGN_BYTES} bytes, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._taken: dict[int, tuple[int, int]] = {}
        self._next_slot = 1

    @property
    def free_bytes(self) -> int:
        """Bytes not taken."""
        return sum(length for _, length in self._free)

    @property
    def slots(self) -> int:
        """Slots handed out and not yet freed."""
        return len(self._taken)

    def fits(self, nbytes: int) -> bool:
        """Whether a tensor of this size can ever have a slot."""
        return nbytes <= self.capacity_bytes

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Takes a slot of at least `nbytes`; returns (slot, offset), or None when full."""
        need = max(ALIGN_BYTES, (nbytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES)
        for i, (offset, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[i]
                else:
                    self._free[i] = (offset + need, length - need)
                slot = self._next_slot
                self._next_slot += 1
                self._taken[slot] = (offset, need)
                return slot, offset
        return None

    def covers(self, slot: int, offset: int, nbytes: int) -> bool:
        """Whether the slot is taken and these bytes lie in it; may be asked from any thread."""
        entry = self._taken.get(slot)
        return entry is not None and entry[0] == offset and 0 <= nbytes <= entry[1]

    def give_back(self, slot: int) -> bool:
        """Frees a slot; False when it was not taken (a repeated `Ack` does no harm)."""
        entry = self._taken.pop(slot, None)
        if entry is None:
            return False
        offset, length = entry
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and offset + length == self._free[i][0]:
            length += self._free[i][1]
            del self._free[i]
        if i > 0 and self._free[i - 1][0] + self._free[i - 1][1] == offset:
            offset, before = self._free[i - 1]
            length += before
            del self._free[i - 1]
            i -= 1
        self._free.insert(i, (offset, length))
        return True


class Ring:
    """A producer's ring.

    Args:
        capacity_bytes: size; pages are only taken as they are first written.
        is_checked: whether tensors get checksums.

    Raises:
        WireError: the system has no memory, address space or descriptor for it.
    """

    def __init__(self, capacity_bytes: int, *, is_checked: bool = False) -> None:
        self.ledger = RingLedger(capacity_bytes)
        self._is_checked = is_checked
        self._fd, self._map = _made(self.ledger.capacity_bytes)
        self._view = memoryview(self._map)
        self._pid = os.getpid()

    @property
    def whole(self) -> memoryview:
        """All its bytes, for whoever pins them."""
        return self._view

    def reserve(self, nbytes: int, dtype: str, shape: tuple[int, ...]) -> TensorRef | None:
        """Takes a slot that is written afterwards, through `window`; None when the ring is full."""
        taken = self.ledger.take(nbytes)
        if taken is None:
            return None
        slot, offset = taken
        return TensorRef(dtype, shape, self._pid, self._fd, offset, nbytes, slot)

    def write(self, data: memoryview, dtype: str, shape: tuple[int, ...]) -> TensorRef | None:
        """Copies a tensor's bytes into a slot; None when the ring is full at the moment."""
        ref = self.reserve(data.nbytes, dtype, shape)
        if ref is None:
            return None
        self._view[ref.offset : ref.offset + ref.nbytes] = data
        return self.with_checksum(ref, data)

    def with_checksum(self, ref: TensorRef, data: memoryview) -> TensorRef:
        """The reference with the checksum of its bytes, where tensors get one."""
        return replace(ref, checksum=zlib.crc32(data)) if self._is_checked else ref

    def window(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot that was handed out, for whoever carries them to another node.

        Raises:
            RingError: the slot is free, or is another one.
        """
        if not self.ledger.covers(slot, offset, nbytes):
            raise RingError(
                f"slot {slot} at {offset}+{nbytes} is not handed out in a ring of "
                f"{self.ledger.capacity_bytes} bytes"
            )
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmaps and closes the ring; consumers that mapped it keep their mapping."""
        self._view.release()
        self._map.close()
        os.close(self._fd)


def _made(nbytes: int) -> tuple[int, mmap.mmap]:
    fd = -1
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise WireError(
            f"a ring of {nbytes} bytes (KEYSTAGE_RING_BYTES) cannot be made: {error.strerror or error}"
        ) from error


class RingWatcher(Protocol):
    """Whoever pins mappings for a device."""

    def ring_mapped(self, whole: memoryview) -> None:
        """Another process's ring is mapped here."""

    def ring_dropped(self, whole: memoryview) -> None:
        """It is about to be unmapped."""


class PeerRings:
    """Mappings of other processes' rings, opened on first use and kept."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], memoryview] = {}
        self._pid_of: dict[str, int] = {}
        self._watcher: RingWatcher | None = None

    def watch(self, watcher: RingWatcher) -> None:
        """Tells somebody of every mapping that is made, and before one is dropped."""
        self._watcher = watcher

    def view(self, ref: TensorRef, owner: str = "") -> memoryview:
        """The bytes a reference names, without a copy; valid until the slot's `Ack`.

        Args:
            ref: where the bytes lie.
            owner: inbox address of the producer, by which `forget` finds the mapping.

        Raises:
            RingError: the owner is gone, is no ring, or the range lies outside of it.
        """
        if owner and self._pid_of.get(owner) != ref.pid:
            # The producer was started anew under its old address.
            self.forget(owner)
            self._pid_of[owner] = ref.pid
        whole = self._maps.get((ref.pid, ref.fd))
        if whole is None:
            whole = self._open(ref.pid, ref.fd)
        if not 0 <= ref.offset <= ref.offset + ref.nbytes <= whole.nbytes:
            raise RingError(
                f"tensor at {ref.offset}+{ref.nbytes} lies outside the ring of pid {ref.pid} "
                f"({whole.nbytes} bytes)"
            )
        return whole[ref.offset : ref.offset + ref.nbytes]

    def forget(self, owner: str) -> None:
        """Drops the mappings of a dead producer: its memory is freed, its id may be used again."""
        pid = self._pid_of.pop(owner, None)
        for key in [key for key in self._maps if key[0] == pid]:
            whole = self._maps.pop(key)
            if self._watcher is not None:
                self._watcher.ring_dropped(whole)

    def _open(self, pid: int, fd: int) -> memoryview:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            found = str(Path(path).readlink())
            if not found.startswith(f"/memfd:{_NAME}"):
                raise RingError(f"{path} is {found}, not a ring")
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RingError(
                f"ring of pid {pid} (descriptor {fd}) cannot be opened: {error.strerror}"
            ) from error
        try:
            whole = memoryview(mmap.mmap(opened, os.fstat(opened).st_size))
        finally:
            os.close(opened)
        self._maps[pid, fd] = whole
        if self._watcher is not None:
            self._watcher.ring_mapped(whole)
        return whole

"""Pinned host memory: what may be pinned, a ring to stage through, and words for a refusal.

Below `device_copy`. A DMA engine reads pinned pages only. Pages of a segment are either registered
where they lie, chunk by chunk while others are being copied, or staged: lanes copy them into a small
ring that was pinned once. Where the system pins nothing, the driver stages in its own buffers (an
eighth of the speed); that is a warning, never the end of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource

from keystage.wire.cuda_driver import CudaError, Driver

RING_CHUNK_BYTES = 4 * 1024 * 1024
_HUGE_BYTES = 2 * 1024 * 1024
RING_DEPTH = 3
"""Chunks per lane: one being filled, one being read by the device, one between."""
MAX_LANES = 15
"""Measured on an H200 with 16 cores, 5 GiB: 15 lanes of 4 MiB 48 GB/s, 12 of 8 MiB 39 to 45; more lanes
than cores get slower."""


def lanes() -> int:
    """Lanes that this process's cores can run, one core left for whoever submits."""
    return max(1, min(MAX_LANES, len(os.sched_getaffinity(0)) - 1))


def memlock_text() -> str:
    """The limit on locked memory, for a message."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


class RingMemory:
    """Memory for a ring, touched, in pages of 2 MiB where the kernel gives them; needs no device.

    Pinning it takes 5 ms then; memory that the driver allocates itself takes 0.9 s per GiB.

    Args:
        lanes: of the ring.

    Attributes:
        nbytes: its size.
        address: where it begins.

    Raises:
        CudaError: there is no room for it.
    """

    def __init__(self, lanes: int) -> None:
        self.nbytes = lanes * RING_DEPTH * RING_CHUNK_BYTES
        try:
            self._mapping = mmap.mmap(-1, self.nbytes + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CudaError("mmap", f"{self.nbytes} bytes: {error.strerror}") from error
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-begin // _HUGE_BYTES) * _HUGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping.madvise(mmap.MADV_DONTFORK)  # pinned pages belong to this process alone
        ctypes.memset(self.address, 0, self.nbytes)

    def close(self) -> None:
        """Unmaps it; nothing may be pinned any more."""
        self._mapping.close()


class Ring:
    """Pinned chunks, so many per lane, with streams and events; made once, used by one copy at a time.

    Args:
        driver: its context is current.
        count: lanes.
        memory: for so many lanes, owned from now on; None: it is made here.

    Attributes:
        lanes: how many threads may use it.
        streams: one per lane.
        events: `RING_DEPTH` per lane.

    Raises:
        CudaError: the system pins no memory.
    """

    def __init__(self, driver: Driver, count: int, memory: RingMemory | None = None) -> None:
        self._driver = driver
        self.lanes = count
        self._memory = memory or RingMemory(count)
        self._address = self._memory.address
        try:
            driver.register(self._address, self._memory.nbytes, 0)
        except CudaError:
            self._memory.close()
            raise
        self.streams = [driver.stream() for _ in range(count)]
        self.events = [driver.event() for _ in range(count * RING_DEPTH)]

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self._memory.nbytes

    def place(self, lane: int, number: int) -> tuple[int, int]:
        """(address, event) of a lane's chunk for its `number`-th copy."""
        index = lane * RING_DEPTH + number % RING_DEPTH
        return self._address + index * RING_CHUNK_BYTES, self.events[index]

    def close(self) -> None:
        """Gives everything back; from any thread."""
        self._driver.enter()
        for stream in self.streams:
            self._driver.destroy_stream(stream)
        for event in self.events:
            self._driver.destroy_event(event)
        self.streams, self.events = [], []
        self._driver.unregister(self._address)
        self._memory.close()


def refusal(error: CudaError, nbytes: int) -> str:
    """One line on pinning that was refused: what, how much, and the limit that may stand behind it."""
    return (
        f"{nbytes} bytes could not be pinned ({error}); RLIMIT_MEMLOCK is {memlock_text()}: "
        "raise it, or accept a slower start"
    )

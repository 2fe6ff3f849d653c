"""Pinned host memory: what may be pinned, a ring to stage through, and words for a refusal.

Below `device_copy`. A DMA engine reads pinned pages only. Pages of a segment are either registered
where they lie, chunk by chunk while others are being copied, or staged: lanes copy them into a small
ring that was pinned once. Where the system pins nothing, the driver stages in its own buffers (an
eighth of the speed); that is a warning, never the end of a process.
"""

from __future__ import annotations

import os
import resource

from keystage.wire.cuda_driver import CudaError, Driver

RING_CHUNK_BYTES = 4 * 1024 * 1024
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


class Ring:
    """Pinned chunks, so many per lane, with streams and events; made once, used by one copy at a time.

    Pinning costs 0.9 s per GiB, so a ring pays where it is made ahead (`standby`), or where nothing
    better is allowed.

    Attributes:
        lanes: how many threads may use it.
        streams: one per lane.
        events: `RING_DEPTH` per lane.

    Raises:
        CudaError: the system pins no memory.
    """

    def __init__(self, driver: Driver, count: int) -> None:
        self._driver = driver
        self.lanes = count
        self._address = driver.allocate_pinned(count * RING_DEPTH * RING_CHUNK_BYTES)
        self.streams = [driver.stream() for _ in range(count)]
        self.events = [driver.event() for _ in range(count * RING_DEPTH)]

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self.lanes * RING_DEPTH * RING_CHUNK_BYTES

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
        self._driver.free_pinned(self._address)


def refusal(error: CudaError, nbytes: int) -> str:
    """One line on pinning that was refused: what, how much, and the limit that may stand behind it."""
    return (
        f"{nbytes} bytes could not be pinned ({error}); RLIMIT_MEMLOCK is {memlock_text()}: "
        "raise it, or accept a slower start"
    )

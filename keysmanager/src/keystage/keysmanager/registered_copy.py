"""Copying what a standby registered ahead: few large transfers, with nothing to do in between.

Below `segment_copy`, which copies the rest if there is one. All transfers are queued at once, which takes
microseconds, so the process goes on with its start while the bus works. This module must not pin anything.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from keystage.keysmanager.cuda_driver import Driver
from keystage.keysmanager.registration import Registration

STREAMS = 2
"""One transfer is set up while another runs."""
COPY_BYTES = 128 * 1024 * 1024
"""Most bytes of a transfer; none crosses from one registration into the next, which the driver refuses."""


@contextlib.contextmanager
def copying(driver: Driver, ahead: Registration, source: int, start: int, target: int) -> Iterator[int]:
    """Queues the copies, gives how many bytes of the file that covers, and waits for them at its end.

    Args:
        driver: its context is current in this thread.
        ahead: what was registered.
        source: address of the file.
        start: bytes of the file that are left out.
        target: device address of what follows them.

    Raises:
        CudaError: the device refused a copy.
    """
    streams = [driver.stream() for _ in range(STREAMS)]
    turns = itertools.cycle(streams)
    try:
        for address, nbytes in ahead.chunks:
            end = address - source + nbytes
            for part in range(max(address - source, start), end, COPY_BYTES):
                length = min(COPY_BYTES, end - part)
                driver.queue_copy(target + part - start, source + part, length, next(turns))
        yield ahead.done_bytes
    finally:
        for stream in streams:
            driver.wait_stream(stream)
            driver.destroy_stream(stream)

"""Copying what a standby registered ahead: few large transfers, with nothing to do in between.

Below `segment_copy`, which copies the rest if there is one. All transfers are queued at once, in the
thread that asks: it takes microseconds, and a thread of its own would first wait for the interpreter's
lock. The process goes on with its start while the bus works. This module must not pin anything.
"""

from __future__ import annotations

import itertools

from keystage.keysmanager.registration import Registration
from keystage.wire.cuda_driver import Driver

STREAMS = 2
"""One transfer is set up while another runs."""
COPY_BYTES = 128 * 1024 * 1024
"""Most bytes of a transfer; none crosses from one registration into the next, which the driver refuses."""


class RegisteredCopy:
    """Transfers under way.

    Args:
        driver: its context is current in this thread.
        ahead: what was registered; stays so until `wait` has returned.
        source: address of the file.
        start: bytes of the file that are left out.
        target: device address of what follows them.

    Attributes:
        done_bytes: bytes of the file, from its start, that they cover.
        streams: they run on so many.

    Raises:
        CudaError: the device refused one; none is under way then.
    """

    def __init__(self, driver: Driver, ahead: Registration, source: int, start: int, target: int) -> None:
        self._driver = driver
        self.done_bytes = ahead.done_bytes
        self._streams = [driver.stream() for _ in range(STREAMS)]
        self.streams = len(self._streams)
        turns = itertools.cycle(self._streams)
        try:
            for address, nbytes in ahead.chunks:
                end = address - source + nbytes
                for part in range(max(address - source, start), end, COPY_BYTES):
                    length = min(COPY_BYTES, end - part)
                    driver.queue_copy(target + part - start, source + part, length, next(turns))
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        """Returns when the device has all bytes; once. The context is current in the calling thread.

        Raises:
            CudaError: a transfer failed.
        """
        streams, self._streams = self._streams, []
        for stream in streams:
            self._driver.wait_stream(stream)
        for stream in streams:
            self._driver.destroy_stream(stream)

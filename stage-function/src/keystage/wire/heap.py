"""Giving free pages of the C heap back, in processes that last.

What libraries below Python allocate comes from glibc's heaps. These keep what is freed, and under a steady
load grow into new pages although no more is in use than before: a megabyte here and there in an hour, which
nobody can tell from a leak. Lasting processes give free pages back from their loops, now and then: a tenth of
a millisecond, and the page faults of what is wanted again. A libc without `malloc_trim` keeps them.
"""

from __future__ import annotations

import ctypes
import time

TRIM_EVERY_S = 20.0


class HeapTrim:
    """Trims the heap of this process, not more often than every so many seconds.

    Args:
        every_s: seconds between two trims; the first comes so long after the begin.

    Attributes:
        trims: how often it did.
    """

    def __init__(self, every_s: float = TRIM_EVERY_S) -> None:
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.trims = 0

    def now_and_then(self) -> None:
        """Trims if it is time to; cheap otherwise."""
        now_s = time.monotonic()
        if self._trim is None or now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        self._trim(0)
        self.trims += 1

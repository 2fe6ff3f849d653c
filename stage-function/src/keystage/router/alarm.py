"""Calls back at a time that is set anew again and again; on the event loop, for `node`.

The core says when it wants to be asked next; a periodic tick would be late by half its period on average.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

LEAST_S = 0.0005
"""The event loop's clock is no finer; a time that has passed already is not asked for in a tight loop."""


class Alarm:
    """One time at most is set.

    Args:
        ring: called when it has come.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at_s = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        """Rings at this time (`time.monotonic`) and no other, infinite for never."""
        if at_s == self._at_s:
            return
        self.clear()
        self._at_s = at_s
        if at_s < math.inf:
            self._handle = loop.call_later(max(LEAST_S, at_s - time.monotonic()), self._rings)

    def clear(self) -> None:
        """Rings no more."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at_s = None, math.inf

    def _rings(self) -> None:
        self._handle, self._at_s = None, math.inf
        self._ring()

"""How fast a queue drains and how long service takes, as measured. Pure; time comes in.

Under `admission`. The drain rate is measured only while something is left waiting: then it is what the
pipeline can do, and not what it was asked for. Nothing is said before something was measured.
"""

from __future__ import annotations

import math
from collections import deque

BIN_S = 0.05
"""What leaves within this time leaves together: sessions end with their wave, items with their batch."""
LEAST_S = 0.2
"""Measured for less, a rate is not one."""
MEMORY_S = 3.0
"""The weight of what was measured falls by e in so much time under load, or in four long services."""
FORGOTTEN_S = 60.0
"""What was measured so long ago may be of other times."""
_LAST = 64
"""Services among which the quickest is looked for."""
_NEW = 0.1
"""Weight of one more service in mean and deviation."""


class DrainRate:
    """Work that leaves a queue in a second while there is more of it."""

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0
        self._measured_s = -math.inf
        self._base_s: float | None = None
        """Start of the open bin, None: nothing was left waiting."""
        self._earlier_s: float | None = None
        """Start of the one before: the open bin's work took from there to its own start."""
        self._open = 0.0

    def left(self, work: float, now_s: float, *, is_more: bool, memory_s: float = MEMORY_S) -> None:
        """Something left the queue to be served.

        Args:
            work: of it.
            now_s: the time.
            is_more: whether something else has to wait now.
            memory_s: how much of the past counts.
        """
        if not is_more:
            self.emptied()
        elif self._base_s is None:
            self._base_s = now_s
        elif now_s - self._base_s <= BIN_S:
            self._open += work
        else:
            self._close(memory_s, now_s)
            self._earlier_s, self._base_s, self._open = self._base_s, now_s, work

    def emptied(self) -> None:
        """Nothing waits: from here to the next one that has to, nothing is measured."""
        self._base_s = self._earlier_s = None
        self._open = 0.0

    def grew(self, ratio: float) -> None:
        """There is more to serve with, by a ratio of at least 1."""
        self._work *= ratio

    def forget(self) -> None:
        """What was measured holds no more."""
        self._work = self._seconds = 0.0
        self.emptied()

    def per_s(self, now_s: float) -> float | None:
        """Work a second, None: it is not known."""
        if self._seconds < LEAST_S or now_s - self._measured_s > FORGOTTEN_S:
            return None
        return self._work / self._seconds if self._work > 0 else None

    def _close(self, memory_s: float, now_s: float) -> None:
        if self._earlier_s is None or self._base_s is None:
            return
        took_s = self._base_s - self._earlier_s
        kept = math.exp(-took_s / memory_s)
        self._work = kept * self._work + self._open
        self._seconds = kept * self._seconds + took_s
        self._measured_s = now_s


class ServiceSeconds:
    """Seconds that one unit of a request's length takes once it is begun: mean and mean deviation.

    Attributes:
        usual_s: mean seconds of a whole service.
        measured_s: when the last one ended.
    """

    def __init__(self) -> None:
        self.usual_s = 0.0
        self._last_s: deque[float] = deque(maxlen=_LAST)
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self.measured_s = -math.inf

    def took(self, seconds: float, length: float, now_s: float) -> None:
        """One was served."""
        each_s = seconds / length
        self._last_s.append(each_s)
        if self._mean_s is None:
            self._mean_s, self.usual_s = each_s, seconds
            self._deviation_s = each_s / 2  # one value says nothing of others
        else:
            self._deviation_s += _NEW * (abs(each_s - self._mean_s) - self._deviation_s)
            self._mean_s += _NEW * (each_s - self._mean_s)
            self.usual_s += _NEW * (seconds - self.usual_s)
        self.measured_s = now_s

    def mean_s(self, length: float) -> float:
        """What one of that length takes, 0: it is not known."""
        return length * (self._mean_s or 0.0)

    def fastest_s(self, length: float) -> float:
        """What one of that length took in the quickest of the last services, 0: it is not known."""
        return length * min(self._last_s, default=0.0)

    def least_s(self, length: float) -> float:
        """What nearly all take at least."""
        return length * max(0.0, (self._mean_s or 0.0) - 2 * self._deviation_s)

    def most_s(self, length: float) -> float:
        """What most take at most."""
        return length * ((self._mean_s or 0.0) + 2 * self._deviation_s)

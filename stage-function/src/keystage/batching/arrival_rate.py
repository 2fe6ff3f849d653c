"""A model's arrivals as the scheduler sees them: rate and burstiness. Pure.

Counts over a window and the one before it. A window is long enough for its count to mean something and, at
low rates, ends all the same, so that a rate that falls is noticed.
"""

from __future__ import annotations

ENOUGH = 1600
"""Gaps that end a window: two windows know the rate to 2 % when requests come at random."""

FIRST = 50
"""Gaps that end the first window; each is twice as long until `ENOUGH`."""

LONGEST_SLOS = 400.0
"""A window ends after so many objectives in any case; none is shorter than a twentieth of that."""


class ArrivalRate:
    """Rate and burstiness of one model's arrivals, by windows.

    Attributes:
        rate_rps: requests/s over the last two windows, 0 before the first has ended.
        scv: squared coefficient of variation of the gaps between arrivals there; 1 at random.
    """

    __slots__ = (
        "_before",
        "_before_s",
        "_before_s2",
        "_enough",
        "_gaps",
        "_last_s",
        "_since_s",
        "_squares_s2",
        "rate_rps",
        "scv",
    )

    def __init__(self) -> None:
        self.rate_rps = 0.0
        self.scv = 1.0
        self._gaps = -1
        self._since_s = self._last_s = 0.0
        self._squares_s2 = 0.0
        self._before = 0
        self._before_s = self._before_s2 = 0.0
        self._enough = FIRST

    def count(self, now_s: float, slo_s: float) -> bool:
        """One more has come. Returns whether a window has ended with it."""
        self._gaps = gaps = self._gaps + 1
        if gaps == 0:
            self._since_s = self._last_s = now_s
            return False
        gap_s = now_s - self._last_s
        self._last_s = now_s
        self._squares_s2 += gap_s * gap_s
        if gaps < self._enough:
            return False
        lasted_s = now_s - self._since_s
        if self._enough == ENOUGH and lasted_s < LONGEST_SLOS / 20 * slo_s:
            return False
        self._end(now_s)
        return True

    def look(self, now_s: float, slo_s: float) -> bool:
        """Ends the window when it has lasted too long, fewer coming than before; returns whether it has."""
        if self._gaps < 0 or now_s - self._since_s <= LONGEST_SLOS * slo_s:
            return False
        self._end(now_s)
        return True

    def _end(self, now_s: float) -> None:
        gaps, lasted_s = self._gaps + self._before, now_s - self._since_s + self._before_s
        squares_s2 = self._squares_s2 + self._before_s2
        if lasted_s > 0:
            self.rate_rps = gaps / lasted_s
            # Gaps of a window, whose sum is at most what it lasted.
            self.scv = max(0.0, gaps * squares_s2 / lasted_s**2 - 1)
        self._before, self._before_s, self._before_s2 = self._gaps, now_s - self._since_s, self._squares_s2
        self._gaps, self._since_s, self._squares_s2 = 0, now_s, 0.0
        self._enough = min(ENOUGH, 2 * self._enough)

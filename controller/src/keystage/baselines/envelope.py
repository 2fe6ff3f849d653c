"""Traffic envelopes of network calculus: how many requests came within any window of a given width.

Before it: cumulative arrivals at observation times. After it: InferLine's planner keeps the envelope of
the planned traffic, its tuner compares the present one with it. Source: InferLine (Crankshaw and others,
SoCC 2020), section on the tuner: the smallest window is the service time of the system, widths double up
to 60 s, the rate of a window is r_i = q_i / dT_i. Pure arithmetic.

Counters are read once a tick, so a window is counted from the last look at or before its begin; windows
narrower than a tick do not exist for anybody who reads counters.
"""

from __future__ import annotations

import bisect


def widths(service_s: float, longest_s: float, least_s: float) -> tuple[float, ...]:
    """Widths of the windows in seconds: from the service time (but at least `least_s`), doubling.

    The last one is `longest_s` itself.
    """
    width = max(service_s, least_s)
    found: list[float] = []
    while width < longest_s:
        found.append(width)
        width *= 2
    return (*found, longest_s)


class ArrivalLog:
    """Cumulative arrivals over time, forgetting what is older than `keep_s`.

    Args:
        keep_s: seconds that can be asked back.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._at_s: list[float] = []
        self._total: list[float] = []

    @property
    def first_s(self) -> float | None:
        """Time of the oldest look kept, None before the first."""
        return self._at_s[0] if self._at_s else None

    @property
    def looks(self) -> tuple[list[float], list[float]]:
        """Times of the looks and cumulative arrivals at them, not to be changed."""
        return self._at_s, self._total

    def add(self, at_s: float, total: float) -> None:
        """Takes in one look; a time that does not advance replaces nothing and is dropped."""
        if self._at_s and at_s <= self._at_s[-1]:
            return
        self._at_s.append(at_s)
        self._total.append(total)
        if len(self._at_s) > 64 and self._at_s[len(self._at_s) // 2] < at_s - self._keep_s:
            cut = bisect.bisect_right(self._at_s, at_s - self._keep_s) - 1
            del self._at_s[:cut], self._total[:cut]

    def count(self, begin_s: float, end_s: float) -> float:
        """Arrivals between the last looks at or before the two times (the oldest look at the earliest)."""
        if not self._at_s:
            return 0.0
        low = max(0, bisect.bisect_right(self._at_s, begin_s + 1e-9) - 1)
        high = max(0, bisect.bisect_right(self._at_s, end_s + 1e-9) - 1)
        return max(0.0, self._total[high] - self._total[low])

    def rates(self, windows: tuple[float, ...], end_s: float) -> tuple[float, ...]:
        """Rates r_i of the windows that end at a time, per second."""
        return tuple(self.count(end_s - width, end_s) / width for width in windows)

    def envelope(self, windows: tuple[float, ...]) -> tuple[float, ...]:
        """Largest rate of each window anywhere in what is kept, per second.

        A window wider than what is kept has its mean rate: nothing is known of its peaks.
        """
        if len(self._at_s) < 2:
            return (0.0,) * len(windows)
        span_s = self._at_s[-1] - self._at_s[0]
        mean = (self._total[-1] - self._total[0]) / span_s
        best = [mean] * len(windows)
        for end_s in self._at_s:
            for i, rate in enumerate(self.rates(windows, end_s)):
                best[i] = max(best[i], rate)
        return tuple(best)

    def peak_rps(self, begin_s: float, end_s: float, width_s: float) -> float:
        """Largest rate over adjacent windows of one width that end at `end_s` and reach back to `begin_s`."""
        best = 0.0
        while end_s - width_s >= begin_s - 1e-9:
            best = max(best, self.count(end_s - width_s, end_s) / width_s)
            end_s -= width_s
        return best

    def times(self, begin_s: float) -> tuple[list[float], float]:
        """Arrival times since `begin_s`, spread evenly within each look, and the time they span.

        Single arrivals are not seen, only how many came between two looks.
        """
        times: list[float] = []
        low = max(0, bisect.bisect_right(self._at_s, begin_s) - 1)
        for i in range(low + 1, len(self._at_s)):
            came = int(self._total[i] - self._total[low]) - len(times)
            width_s = self._at_s[i] - self._at_s[i - 1]
            times += [self._at_s[i - 1] + width_s * (k + 1) / came for k in range(came)]
        span_s = self._at_s[-1] - self._at_s[low] if self._at_s else 0.0
        return times, span_s

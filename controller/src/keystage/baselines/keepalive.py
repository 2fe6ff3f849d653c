"""LSTH, INFless's long-short-term histogram: how long an idle instance stays, when it comes back.

Before it: `dispatch` says how many instances are needed now. After it: `infless` asks for those and the
ones kept warm. Sources: INFless (ASPLOS 2022), section on cold starts; it builds on the hybrid histogram of
Shahrad and others (USENIX ATC 2020): idle times of a function are recorded; after `head` (their 5th
percentile) an unloaded function is loaded again, and until `tail` (the 99th) it is kept. LSTH takes both
percentiles from a long (1 day) and a short (1 hour) history and weighs them:

    window = gamma long + (1 - gamma) short

Gaps filled here: the papers speak of a function that is loaded or not; a function with n instances is read
as n levels, level i being busy while at least i instances are needed, so idle times are those of levels.
Percentiles are of the samples themselves (bins of a minute would swallow every time that occurs here), with
the 10 % margins of the hybrid histogram. An instance is loaded again so that it is ready at the head, less
its margin; where a start takes longer than that, the pre-warm window is 0: unloading would not pay. Until
`least` idle times are known, `keep_s` holds for all.
"""

from __future__ import annotations

import math

import msgspec

MARGIN_RATIO = 0.1


class KeepAliveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Windows of LSTH.

    Attributes:
        long_s: history of the long histogram, a day in the paper.
        short_s: of the short one, an hour.
        gamma_ratio: weight of the long one, 0.5 in the paper.
        head_ratio: percentile of the pre-warm window.
        tail_ratio: percentile of the keep-alive window.
        keep_s: keep-alive until enough is known. Platforms keep functions for 10 minutes; a whole GPU is
            dearer, and the experiments last minutes.
        least: idle times before their percentiles count.
        most_s: no idle instance is kept longer, whatever the histogram says.
    """

    long_s: float = 86400.0
    short_s: float = 3600.0
    gamma_ratio: float = 0.5
    head_ratio: float = 0.05
    tail_ratio: float = 0.99
    keep_s: float = 60.0
    least: int = 5
    most_s: float = 600.0


def percentile(values: list[float], ratio: float) -> float:
    """The smallest value that this part of the values does not exceed; values sorted, not empty."""
    return values[max(0, math.ceil(ratio * len(values)) - 1)]


class LongShortHistogram:
    """Idle times of the levels of one function, and which levels are kept warm.

    Args:
        settings: windows.
    """

    def __init__(self, settings: KeepAliveSettings) -> None:
        self._settings = settings
        self._gaps: list[tuple[float, float]] = []
        self._idle_since: dict[int, float] = {}
        self._windows: tuple[float, float] | None = None

    def warm(self, needed: int, present: int, at_s: float, start_s: float) -> int:
        """How many instances there shall be, needed ones and warm ones.

        Args:
            needed: instances needed now.
            present: instances wanted so far: those above `needed` become idle now, if they were not.
            at_s: now.
            start_s: seconds an instance takes to start.
        """
        for level in [k for k in self._idle_since if k <= needed]:
            self._record(at_s, at_s - self._idle_since.pop(level))
        for level in range(needed + 1, present + 1):
            self._idle_since.setdefault(level, at_s)
        head_s, tail_s = self.windows(at_s, start_s)
        forgotten = [k for k, since_s in self._idle_since.items() if at_s - since_s > tail_s]
        for level in forgotten:
            self._record(at_s, at_s - self._idle_since.pop(level))
        return needed + sum(at_s - since_s >= head_s for since_s in self._idle_since.values())

    def windows(self, at_s: float, start_s: float) -> tuple[float, float]:
        """(pre-warm, keep-alive): an idle level is warm from the first until the second, in seconds idle.

        With a pre-warm window of 0 the instance is not unloaded before.
        """
        settings = self._settings
        if self._windows is None:
            pairs = [self._percentiles(at_s, span_s) for span_s in (settings.long_s, settings.short_s)]
            known = [p for p in pairs if p is not None]
            if not known:
                return 0.0, min(settings.keep_s, settings.most_s)
            (long_head, long_tail), (short_head, short_tail) = known[0], known[-1]
            gamma = settings.gamma_ratio
            self._windows = (
                gamma * long_head + (1 - gamma) * short_head,
                gamma * long_tail + (1 - gamma) * short_tail,
            )
        head_s, tail_s = self._windows
        tail_s = min(settings.most_s, tail_s * (1 + MARGIN_RATIO))
        return max(0.0, head_s * (1 - MARGIN_RATIO) - start_s), tail_s

    def _record(self, at_s: float, gap_s: float) -> None:
        self._gaps.append((at_s, gap_s))
        self._windows = None
        if len(self._gaps) > 4000:
            self._gaps = self._gaps[-2000:]

    def _percentiles(self, at_s: float, span_s: float) -> tuple[float, float] | None:
        recent = sorted(gap for end_s, gap in self._gaps if end_s >= at_s - span_s)
        if len(recent) < self._settings.least:
            return None
        return percentile(recent, self._settings.head_ratio), percentile(recent, self._settings.tail_ratio)

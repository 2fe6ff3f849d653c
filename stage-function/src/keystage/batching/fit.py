"""Keeps l(b) = alpha b + beta current from batches as they are measured. Pure.

Before it: whoever sees batches end (the router). After it: schedulers, by `Scheduler.set_profile`. The line
is fitted to the last `WINDOW` batches only, so that it follows a device that changes, and by medians
throughout (per batch size, then over the slopes between sizes: Theil and Sen), so that a few stray batches,
a hung device or a clock that jumped do not move it. What is no time at all is not taken.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from keystage.batching.profile import ANY_BATCH, LatencyProfile

WINDOW = 128
"""Batches a fit looks back at: seconds of a busy stage, and a fit of them takes well under a millisecond."""
EVERY = 8
"""A fit is made anew after so many batches; at first after each one."""
MOST_SIZES = 24
"""Distinct sizes that a fit tells apart; neighbouring ones are put together beyond that."""
STRAYS = 2
"""The largest of what a percentile looks at that do not count."""
OLD_S = 20.0
KEPT = 16
"""What is older than that tells little of now, unless it is among the last few."""
LONGEST_S = 3600.0
LEAST_S = 1e-7
"""A batch takes time, whatever a coarse clock says."""


class ProfileFit:
    """The running fit of one stage (or of a run of stages) on one kind of replica.

    Args:
        prior: what is believed before anything was measured, None for nothing.
    """

    def __init__(self, prior: LatencyProfile | None = None) -> None:
        self._prior = prior
        self._seen: deque[tuple[float, int, float]] = deque(maxlen=WINDOW)
        self._line = (prior.alpha_s, prior.beta_s) if prior is not None else None
        self._since = 0
        self.count = 0

    def add(self, batch: int, seconds: float, now_s: float = 0.0) -> bool:
        """Takes one measured batch; returns whether the fit was made anew.

        Args:
            batch: its size.
            now_s: the time; what is older than `OLD_S` is forgotten, but for the last few.
            seconds: its compute time. What is not finite, negative or longer than `LONGEST_S` is ignored.
        """
        if batch < 1 or not 0 <= seconds <= LONGEST_S:  # NaN fails both comparisons
            return False
        seen = self._seen
        seen.append((now_s, min(batch, ANY_BATCH), max(seconds, LEAST_S)))
        while len(seen) > KEPT and seen[0][0] < now_s - OLD_S:
            seen.popleft()
        self.count += 1
        self._since += 1
        if self._since < EVERY and self.count > EVERY:
            return False
        self._since = 0
        self._line = _fit([(size, took_s) for _, size, took_s in seen], self._prior)
        return True

    @property
    def is_line(self) -> bool:
        """Whether two sizes are known at least, by some batches."""
        return len(self._seen) >= 2 * EVERY and len({batch for _, batch, _ in self._seen}) > 1

    def profile(self, most: int = ANY_BATCH) -> LatencyProfile | None:
        """The present line, None before the first batch where there was no prior.

        Args:
            most: largest batch that a replica takes.
        """
        if self._line is None:
            return None
        return LatencyProfile(*self._line, most)


def _fit(seen: Iterable[tuple[int, float]], prior: LatencyProfile | None) -> tuple[float, float]:
    """(alpha_s, beta_s), both at least 0 and not both 0."""
    points = _medians(seen)
    if len(points) == 1:
        return _through(points[0], prior)
    slopes = [
        ((t - s) / (b - a), math.sqrt(n * m) * (b - a))
        for i, (a, s, n) in enumerate(points)
        for b, t, m in points[i + 1 :]
    ]
    alpha_s = max(0.0, _weighted_median(slopes))
    beta_s = _weighted_median([(t - alpha_s * b, n) for b, t, n in points])
    if beta_s < 0:
        # No cost of its own is seen: all of the time is the items'.
        beta_s = 0.0
        alpha_s = _weighted_median([(t / b, n * b) for b, t, n in points])
    return alpha_s, max(beta_s, LEAST_S if alpha_s == 0 else 0.0)


def _through(point: tuple[float, float, float], prior: LatencyProfile | None) -> tuple[float, float]:
    """One size only: the prior, scaled. Without one, half of the time counts per batch.

    All of it per item would promise nothing, and no larger batch would ever be tried, and measured.
    """
    batch, seconds, _ = point
    if prior is None:
        return seconds / 2 / batch, seconds / 2
    scale = seconds / (prior.alpha_s * batch + prior.beta_s)
    return prior.alpha_s * scale, prior.beta_s * scale


def _medians(seen: Iterable[tuple[int, float]]) -> list[tuple[float, float, float]]:
    """(size, median seconds, batches) ascending by size, at most `MOST_SIZES`."""
    by_size: dict[int, list[float]] = {}
    for batch, seconds in seen:
        by_size.setdefault(batch, []).append(seconds)
    sizes = sorted(by_size)
    step = -(-len(sizes) // MOST_SIZES)
    points = []
    for first in range(0, len(sizes), step):
        group = sizes[first : first + step]
        times = [(batch, seconds) for batch in group for seconds in by_size[batch]]
        points.append(
            (
                sum(batch for batch, _ in times) / len(times),
                statistics.median(seconds for _, seconds in times),
                float(len(times)),
            )
        )
    return points


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value at which half of the weight lies on either side."""
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][0]


class HighPercentile:
    """A high percentile of the last measurements of something in seconds.

    Args:
        share: which, 0.99 by default: the scheduler plans with a bound, not with a mean (Symphony, 5.6).
        window: measurements it looks back at.
    """

    def __init__(self, share: float = 0.99, window: int = 256) -> None:
        self._share = share
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, seconds: float, now_s: float = 0.0) -> None:
        """Takes one measurement; what is no time (not finite, longer than an hour) is ignored."""
        if not -LONGEST_S <= seconds <= LONGEST_S:
            return
        self._seen.append((now_s, max(0.0, seconds)))
        while len(self._seen) > KEPT and self._seen[0][0] < now_s - OLD_S:
            self._seen.popleft()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def median_s(self) -> float:
        """The median, 0 before the first measurement."""
        return statistics.median(seconds for _, seconds in self._seen) if self._seen else 0.0

    @property
    def value_s(self) -> float:
        """The percentile, 0 before the first measurement."""
        if not self._seen:
            return 0.0
        ordered = sorted(seconds for _, seconds in self._seen)
        # Of few measurements the share would be the largest: one hiccup would rule for as long as it is seen.
        return ordered[max(0, min(int(self._share * len(ordered)), len(ordered) - 1 - STRAYS))]

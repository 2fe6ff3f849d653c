"""Running statistics over blocks of numbers, in memory that does not grow with them; pure.

Means and variances are merged after Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from keystage.loadgen.traces.model import Floats, Ints


@dataclasses.dataclass(slots=True)
class Moments:
    """Count, mean and population variance.

    Attributes:
        count: of numbers.
        mean: their mean.
        squares: sum of squared deviations from it.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Floats | Ints) -> None:
        """Takes numbers, shape (n,)."""
        if len(values):
            mean = float(values.mean())
            self._merge(len(values), mean, float(((values - mean) ** 2).sum()))

    def add_zeros(self, count: int) -> None:
        """Takes that many zeros."""
        if count:
            self._merge(count, 0.0, 0.0)

    def _merge(self, count: int, mean: float, squares: float) -> None:
        total = self.count + count
        apart = mean - self.mean
        self.squares += squares + apart * apart * (self.count / total) * count
        self.mean += apart * (count / total)
        self.count = total

    @property
    def cv(self) -> float | None:
        """Coefficient of variation; None below two numbers or at mean 0."""
        if self.count < 2 or self.mean <= 0:
            return None
        return math.sqrt(self.squares / self.count) / self.mean

    @property
    def dispersion(self) -> float | None:
        """Variance over mean; None below two numbers or at mean 0."""
        return None if self.count < 2 or self.mean <= 0 else self.squares / self.count / self.mean


class Bins:
    """Counts of events in adjoining bins of one width: moments over whole bins, and the fullest.

    Args:
        width_s: width of a bin.
        from_s: start of the first.
    """

    def __init__(self, width_s: float, from_s: float) -> None:
        self.width_s = width_s
        self.moments = Moments()
        self.peak = 0
        self.peak_at_s = from_s
        self._from_s = from_s
        self._open = 0
        self._in_open = 0

    def add(self, at_s: Floats) -> None:
        """Takes times, ascending, none before those taken already."""
        bins, counts = np.unique(np.floor((at_s - self._from_s) / self.width_s), return_counts=True)
        if bins[0] == self._open:
            counts[0] += self._in_open
        elif self._in_open:
            bins, counts = np.insert(bins, 0, self._open), np.insert(counts, 0, self._in_open)
        fullest = int(counts.argmax())
        if counts[fullest] > self.peak:
            self.peak = int(counts[fullest])
            self.peak_at_s = self._from_s + float(bins[fullest]) * self.width_s
        last = int(bins[-1])
        self.moments.add_zeros(last - self.moments.count - (len(bins) - 1))
        self.moments.add(counts[:-1])
        self._open, self._in_open = last, int(counts[-1])

    def close(self, to_s: float) -> None:
        """Ends at to_s; a bin that reaches beyond it is left out of the moments."""
        whole = math.floor((to_s - self._from_s) / self.width_s)
        if self._open < whole:
            self.moments.add(np.array([self._in_open]))
            self.moments.add_zeros(whole - self._open - 1)


class Series:
    """Counts over time in at most MOST bins, whose width doubles when they would not do."""

    MOST = 4096

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.width_s = 1.0
        self.counts = np.zeros(self.MOST, np.int64)

    def add(self, at_s: Floats) -> None:
        """Takes times."""
        after_s = at_s - self.from_s
        while after_s[-1] >= self.MOST * self.width_s:
            self.counts[: self.MOST // 2] = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts[self.MOST // 2 :] = 0
            self.width_s *= 2
        self.counts += np.bincount((after_s / self.width_s).astype(np.int64), minlength=self.MOST)


class Digest:
    """Numbers at least 0, kept to three significant digits: quantiles within 0.5 %."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._total = 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, values: Floats | Ints, weights: Ints | None = None) -> None:
        """Takes numbers, shape (n,); weights say how often each counts."""
        if not len(values):
            return
        floats = values.astype(np.float64)
        self._least = min(self._least, float(floats.min()))
        self._most = max(self._most, float(floats.max()))
        self._total += float(floats.sum() if weights is None else floats @ weights)
        kept, places = np.unique(_rounded(floats), return_inverse=True)
        counts = np.bincount(places, weights=weights)
        for value, count in zip(kept.tolist(), counts.tolist(), strict=True):
            self._counts[value] += int(count)

    @property
    def count(self) -> int:
        """How many there are."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """Mean of the numbers as they came; 0 without any."""
        return self._total / max(self.count, 1)

    def quantiles(self, probabilities: Sequence[float]) -> list[float]:
        """Inverted distribution function at each probability; the least and the most are exact."""
        values = np.array(sorted(self._counts))
        ends = np.cumsum([self._counts[value] for value in values.tolist()])
        found = []
        for p in probabilities:
            place = int(np.searchsorted(ends, p * ends[-1], side="left"))
            value = float(values[min(place, len(values) - 1)])
            exact = {0.0: self._least, 1.0: self._most}.get(p, value)
            found.append(min(max(exact, self._least), self._most))
        return found


def _rounded(values: Floats) -> Floats:
    """To three significant digits, but no finer than 1e-12."""
    exponents = np.floor(np.log10(np.maximum(values, 1e-10))) - 2
    power = 10.0 ** np.abs(exponents)
    kept: Floats = np.where(exponents < 0, np.rint(values * power) / power, np.rint(values / power) * power)
    return kept

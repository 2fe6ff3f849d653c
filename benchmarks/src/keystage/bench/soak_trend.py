"""Whether something grows with time: slopes with intervals, for `soak`. Pure.

Before it: samples over time. After it: verdicts. Samples are averaged over `BLOCKS` equal spans first,
because neighbouring samples are not independent and would make intervals too narrow; the first quarter of a
run is left out, in which caches, pools and heaps fill. A line is fitted to the blocks by least squares; its
slope gets a Student interval of 95 % with blocks - 2 degrees of freedom. What follows the load is fitted with
it as further regressors (a degree less for each), and the slope is that at an equal load: a router's
connections follow the number of replicas; memory also follows the greatest number so far (`processes`), for
no allocator gives back all that a burst needed: a page goes back when nothing in it lives any more. Something
grows when its interval lies above 0 and the growth over the span is more than `MOST_RATIO` of the level: a
slope may be real and mean nothing.

Of forty slopes of things that do not change one has its interval above 0 by chance. `low_among` is the lower
end where so many are told together, with one error of 5 % for all of them (Bonferroni).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from keystage.bench.whole_client import Floats
from keystage.bench.whole_watch import COLUMNS, ROLES

BLOCKS = 12
LEAST_BLOCKS = 4
WARM_RATIO = 0.25
MOST_RATIO = 0.05
LEVEL = 0.95
_ALMOST_NONE = 1e-9
LEAST_S = 60.0
"""Of the considered part: in less a load's own waves look like trends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """A line through blocks of time.

    Attributes:
        level: mean of the blocks.
        slope: change a second.
        low: lower end of its 95 % interval.
        high: upper end.
        span_s: seconds between the first block's centre and the last one's.
        part_of: level of what this is a part of, 0: it stands for itself.
        error: standard error of the slope.
        degrees: of freedom, 0: nothing is told.
    """

    level: float
    slope: float
    low: float
    high: float
    span_s: float
    part_of: float = 0.0
    error: float = 0.0
    degrees: int = 0

    @property
    def growth_ratio(self) -> float:
        """Growth over the span as part of the level, or of what this is a part of."""
        level = self.part_of or self.level
        return self.slope * self.span_s / level if level else 0.0

    @property
    def is_growing(self) -> bool:
        """See the module."""
        return self.is_told and self.low > 0 and self.growth_ratio > MOST_RATIO

    def low_among(self, count: int) -> float:
        """Lower end of the interval where so many slopes are told together; see the module."""
        if not self.degrees:
            return -math.inf
        return self.slope - _quantile(self.degrees, count) * self.error

    def rises_among(self, count: int) -> bool:
        """Whether that lies above 0, however small the growth."""
        return self.is_told and self.low_among(count) > 0

    @property
    def is_told(self) -> bool:
        """Whether the span is long enough to tell anything."""
        return math.isfinite(self.low) and self.span_s >= LEAST_S

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.is_told:
            return "too short to tell"
        if self.is_growing:
            return "GROWS"
        if self.low > 0:
            return f"rises by {self.growth_ratio:.1%}, within {MOST_RATIO:.0%}"
        return "falls" if self.high < 0 else "no trend"


def trend(
    at_s: Floats,
    values: Floats,
    duration_s: float,
    *,
    loads: Sequence[Floats] = (),
    is_median: bool = False,
    part_of: float = 0.0,
    warm_ratio: float = WARM_RATIO,
) -> Trend:
    """The trend of samples.

    Args:
        at_s: their times, from 0 to `duration_s`.
        values: the samples.
        duration_s: length of the run.
        loads: each at the same times, what the values follow beside time; what is always the same, or follows
            from those before it, tells nothing and is left out.
        is_median: blocks are medians, for latencies; else means.
        part_of: see `Trend`.
        warm_ratio: part of the run that is left out at its begin.

    Returns:
        With fewer than `LEAST_BLOCKS` blocks that hold samples, an interval without ends.
    """
    begin_s = warm_ratio * duration_s
    edges_s = np.linspace(begin_s, duration_s, BLOCKS + 1)
    block = np.searchsorted(edges_s, at_s, side="right") - 1
    middle = np.median if is_median else np.mean
    blocks: list[tuple[float, ...]] = []
    for k in range(BLOCKS):
        inside = (block == k) & np.isfinite(values)
        if inside.any():
            centre = float(edges_s[k] + edges_s[k + 1]) / 2
            means = (float(load[inside].mean()) for load in loads)
            blocks.append((float(middle(values[inside])), centre, *means))
    if len(blocks) < LEAST_BLOCKS:
        level = float(np.mean([y for y, *_ in blocks])) if blocks else 0.0
        return Trend(level, 0.0, -math.inf, math.inf, 0.0, part_of)
    y, x, *beside = np.array(blocks).T
    level = float(y.mean())
    # Time and values, each without what the loads explain of it (Frisch, Waugh and Lovell); each load is
    # first freed of those before it.
    away, known = x - x.mean(), list[Floats]()
    for load in beside:
        rest = load - load.mean()
        for other in known:
            rest = rest - other * float(other @ rest) / float(other @ other)
        if float(rest @ rest) <= _ALMOST_NONE * float(load @ load):
            continue
        known.append(rest)
        away = away - rest * float(rest @ away) / float(rest @ rest)
        y = y - rest * float(rest @ (y - level)) / float(rest @ rest)
    degrees = len(x) - 2 - len(known)
    if degrees < 1 or float(away @ away) < _ALMOST_NONE * float(((x - x.mean()) ** 2).sum()):
        return Trend(level, 0.0, -math.inf, math.inf, float(x[-1] - x[0]), part_of)  # time and loads are one
    slope = float(away @ (y - level)) / float(away @ away)
    rest = y - level - slope * away
    error = math.sqrt(float(rest @ rest) / degrees / float(away @ away))
    half = _quantile(degrees) * error
    span_s = float(x[-1] - x[0])
    return Trend(level, slope, slope - half, slope + half, span_s, part_of, error, degrees)


def _quantile(degrees: int, count: int = 1) -> float:
    return float(stdtrit(degrees, 1 - (1 - LEVEL) / 2 / count))


def processes(samples: Floats, at_s: Floats) -> tuple[Floats, Floats]:
    """Numbers of processes at moments of `samples` (`whole_watch.COLUMNS`), and the greatest until then."""
    times_s, counts = np.unique(samples[:, 0], return_counts=True)
    numbers = counts.astype(np.float64)
    at = np.searchsorted(times_s, at_s)
    return numbers[at], np.maximum.accumulate(numbers)[at]


def by_role(samples: Floats, column: str, duration_s: float) -> dict[str, tuple[Floats, Floats, int]]:
    """Sums over the processes of each role that lived through the considered part of a run.

    Replicas come and go with the load: their number is no leak, what each of them holds may be one.

    Args:
        samples: see `whole_watch.COLUMNS`.
        column: what is summed.
        duration_s: length of the run.

    Returns:
        Times, sums and the number of processes, by role.
    """
    at_s, pid, role = samples[:, 0], samples[:, 1], samples[:, 2]
    times_s = np.unique(at_s)
    late_s = times_s[times_s >= WARM_RATIO * duration_s]
    found: dict[str, tuple[Floats, Floats, int]] = {}
    for index, name in enumerate(ROLES):
        mine = role == index
        stayed = [
            number
            for number in np.unique(pid[mine])
            if len(late_s) and np.isin(late_s, at_s[mine & (pid == number)]).all()
        ]
        if not stayed:
            continue
        kept = mine & np.isin(pid, stayed)
        values = samples[kept, COLUMNS.index(column)]
        sums = np.array([values[at_s[kept] == moment].sum() for moment in late_s])
        found[name] = (late_s, sums, len(stayed))
    return found

"""Brings every policy of Table B to the same GPU-seconds, by its knob.

Before it: what Keystage used as tuned in a cell, seed by seed, is the common figure. After it: the tables
compare at equal GPU-seconds. The search is the same for all rivals, on the very seeds of the table.

GPU-seconds are not monotone in effort: a starved rival drains for long and pays for it, so the common
figure may be met several times, with latencies that differ twentyfold. So first a grid of efforts around
the tuned one is tried on the first seeds, wider where the figure is not reached; then every place where
the grid crosses the figure is refined on all seeds, those with the least latency first. GPU-seconds move
in steps, as replicas do: where two neighbouring efforts that are close lie on either side, some seeds take
the one and some the other, so that the mean over seeds meets the figure. Of all that is within 2 % the
choice with the least latency is taken, to the rival's favour. What cannot be brought there is taken where
its latency is least within 5 % of the nearest it came, and left out of the comparison. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

TOLERANCE_RATIO = 0.02
NEAR_RATIO = 0.05
TIE_RATIO = 0.005
"""GPU-seconds that differ by less are a plateau: the outer effort counts as the nearer."""
LEAST_EFFORT = 0.1
MOST_EFFORT = 12.0
GRID = (0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.2)
"""Efforts tried first, over the tuned one."""
OUTWARD = 2.0
CLOSE = 1.1
"""Efforts no further apart than this may be mixed over the seeds."""
FINEST = 1.004


@dataclasses.dataclass(frozen=True, slots=True)
class Searching:
    """How efforts are searched.

    Attributes:
        seeds: seeds of the table.
        evaluations: most efforts tried on all of them, for one policy and cell.
        grid: efforts of the grid, over the tuned one.
        grid_seeds: how many of the seeds the grid runs on.
    """

    seeds: tuple[int, ...]
    evaluations: int
    grid: tuple[float, ...] = GRID
    grid_seeds: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    """One effort tried.

    Attributes:
        effort: the knob.
        gpu_s: GPU-seconds by seed, of the first seeds or of all.
        latency_s: mean latency by seed, likewise.
    """

    effort: float
    gpu_s: tuple[float, ...]
    latency_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """An effort to be tried on the first `seeds` seeds."""

    effort: float
    seeds: int


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a policy is compared at.

    Attributes:
        efforts: by seed.
        gpu_s: mean GPU-seconds over seeds.
        log_latency: mean logarithm of latency over seeds.
    """

    efforts: tuple[float, ...]
    gpu_s: float
    log_latency: float


@dataclasses.dataclass(slots=True)
class EffortSearch:
    """The search for one policy in one cell.

    Attributes:
        targets_gpu_s: the common figure by seed; their mean is to be met.
        evaluations: most efforts tried on all seeds.
        first_effort: middle of the grid.
        grid: efforts of the grid over the first.
        grid_seeds: seeds of the grid, at most all.
        tried: so far, one for each effort.
    """

    targets_gpu_s: tuple[float, ...]
    evaluations: int
    first_effort: float = 1.0
    grid: tuple[float, ...] = GRID
    grid_seeds: int = 2
    tried: list[Try] = dataclasses.field(default_factory=list)

    @property
    def target_gpu_s(self) -> float:
        """The common figure: mean over seeds."""
        return math.fsum(self.targets_gpu_s) / len(self.targets_gpu_s)

    @property
    def choice(self) -> Choice:
        """The best of what is equal, else of what is nearly the nearest.

        Raises:
            ValueError: no effort was tried on all seeds.
        """
        full = self._full()
        singles = [_mixed([one] * len(one.gpu_s)) for one in full]
        mixes = [mix for low, high in itertools.pairwise(full) for mix in self._mixes(low, high)]
        equal = [choice for choice in singles + mixes if self._is_equal(choice.gpu_s)]
        if equal:
            return min(equal, key=lambda choice: choice.log_latency)
        nearest = min(map(self._distance, singles))
        near = [choice for choice in singles if self._distance(choice) <= nearest + math.log(1 + NEAR_RATIO)]
        return min(near, key=lambda choice: choice.log_latency)

    @property
    def is_equal(self) -> bool:
        """Whether the choice is within 2 %."""
        return bool(self._full()) and self._is_equal(self.choice.gpu_s)

    def add(self, one: Try) -> None:
        """Takes a try in; one of the same effort on fewer seeds is replaced."""
        self.tried = sorted((*(t for t in self.tried if t.effort != one.effort), one), key=lambda t: t.effort)

    def next_asks(self) -> list[Ask]:
        """What to try next, at once; nothing when the search is over."""
        if not self.tried:
            efforts = {_bounded(self.first_effort * ratio) for ratio in self.grid}
            return [Ask(effort, self._few) for effort in sorted(efforts)]
        further = self._beyond()
        if further is not None:
            return [Ask(further, self._few)]
        left = self.evaluations - len(self._full())
        return [Ask(effort, len(self.targets_gpu_s)) for effort in self._wanted()[: max(0, left)]]

    @property
    def _few(self) -> int:
        return min(self.grid_seeds, len(self.targets_gpu_s))

    def _full(self) -> list[Try]:
        return [one for one in self.tried if self._is_full(one)]

    def _is_full(self, one: Try) -> bool:
        return len(one.gpu_s) == len(self.targets_gpu_s)

    def _excess(self, one: Try) -> float:
        """Logarithm of its GPU-seconds over the common ones.

        One tried on the first seeds only is corrected by what the other seeds changed at the nearest effort
        that was tried on all: a single seed may cost a rival twice as much, at any effort.
        """
        excess = self._on(one, len(one.gpu_s))
        full = self._full()
        if self._is_full(one) or not full:
            return excess
        near = min(full, key=lambda other: abs(math.log(other.effort / one.effort)))
        return excess + self._on(near, len(near.gpu_s)) - self._on(near, len(one.gpu_s))

    def _on(self, one: Try, seeds: int) -> float:
        return math.log(math.fsum(one.gpu_s[:seeds]) / math.fsum(self.targets_gpu_s[:seeds]))

    def _distance(self, choice: Choice) -> float:
        return abs(math.log(choice.gpu_s / self.target_gpu_s))

    def _is_equal(self, gpu_s: float) -> bool:
        return abs(gpu_s / self.target_gpu_s - 1) <= TOLERANCE_RATIO

    def _mixes(self, low: Try, high: Try) -> list[Choice]:
        """Neighbours that are close, shared among the seeds."""
        if high.effort > CLOSE * low.effort or len(low.gpu_s) != len(high.gpu_s):
            return []
        return [_mixed(picked) for picked in itertools.product((low, high), repeat=len(low.gpu_s))]

    def _wanted(self) -> list[float]:
        """Efforts that settle a crossing, or a touch, of the common figure; the least latency first."""
        equal = [t for t in self._full() if abs(self._excess(t)) <= TOLERANCE_RATIO]
        best = min((_log_latency(t, self._few) for t in equal), default=math.inf)
        touching = [
            t
            for t in self.tried
            if not self._is_full(t) and abs(self._excess(t)) <= TOLERANCE_RATIO and _log_latency(t) < best
        ]
        touching = sorted(touching, key=_log_latency)[:1]  # one of a plateau tells of all
        found = {one.effort: _log_latency(one) for one in touching}
        for low, high in itertools.pairwise(self.tried):
            is_crossing = (self._excess(low) < 0) != (self._excess(high) < 0)
            is_open = low not in touching and high not in touching and not self._is_settled(low, high)
            if is_crossing and is_open:
                found.setdefault(self._between(low, high), min(_log_latency(low), _log_latency(high)))
        if not found and not self.is_equal:
            return self._unknown()
        return sorted(found, key=lambda effort: found[effort])

    def _unknown(self) -> list[float]:
        """The figure is not met as far as is known: what all seeds make of the effort least known about.

        First where it came nearest, then what is furthest from all that was tried on all seeds.
        """
        few, full = [one for one in self.tried if not self._is_full(one)], self._full()
        if not full:
            nearest = min(abs(self._excess(one)) for one in few)
            near = [t for t in few if abs(self._excess(t)) <= nearest + math.log(1 + NEAR_RATIO)]
            return [min(near, key=_log_latency).effort]
        apart = {t.effort: min(abs(math.log(t.effort / other.effort)) for other in full) for t in few}
        return [max(apart, key=lambda effort: apart[effort])] if apart else []

    def _is_settled(self, low: Try, high: Try) -> bool:
        """Whether a crossing needs no more: equal on all seeds there, or as fine as it gets."""
        ends = [one for one in (low, high) if self._is_full(one)]
        singles = [_mixed([one] * len(one.gpu_s)) for one in ends]
        if any(self._is_equal(choice.gpu_s) for choice in singles):
            return True
        if len(ends) < 2:
            return False
        is_finest = high.effort <= FINEST * low.effort
        return is_finest or any(self._is_equal(mix.gpu_s) for mix in self._mixes(low, high))

    def _between(self, low: Try, high: Try) -> float:
        """Interpolated in logarithms, halved every other time, since steps make interpolation creep.

        Ends that are close and not known on all seeds are asked for themselves: they may mix.
        """
        if high.effort <= CLOSE * low.effort:
            for one in (low, high):
                if not self._is_full(one):
                    return one.effort
        part = -self._excess(low) / (self._excess(high) - self._excess(low))
        part = 0.5 if len(self._full()) % 2 else min(0.85, max(0.15, part))
        return low.effort * math.exp(part * math.log(high.effort / low.effort))

    def _beyond(self) -> float | None:
        """All tried lie on one side: further out while that brings it nearer, or changes nothing."""
        excess = [self._excess(one) for one in self.tried]
        is_short = excess[0] < 0
        if any((value < 0) != is_short or abs(value) <= TOLERANCE_RATIO for value in excess):
            return None
        outward = list(self.tried if is_short else reversed(self.tried))
        least = min(abs(value) for value in excess)
        nearest = max(i for i, t in enumerate(outward) if abs(self._excess(t)) <= least + TIE_RATIO)
        if nearest == len(outward) - 1:
            edge = outward[-1].effort
            effort = _bounded(edge * (OUTWARD if is_short else 1 / OUTWARD))
            return None if effort == edge else effort
        # It turned back: look between, until neighbours are close.
        inner, outer = outward[nearest].effort, outward[nearest + 1].effort
        gap = max(outer / inner, inner / outer)
        return math.sqrt(inner * outer) if gap > CLOSE else None


def _bounded(effort: float) -> float:
    return min(MOST_EFFORT, max(LEAST_EFFORT, effort))


def _log_latency(one: Try, seeds: int | None = None) -> float:
    """Mean logarithm of latency over the first seeds, or over all it was tried on."""
    values = one.latency_s[:seeds]
    return math.fsum(math.log(max(1e-9, value)) for value in values) / len(values)


def _mixed(picked: Sequence[Try]) -> Choice:
    """Seed i at the effort of the i-th."""
    count = len(picked)
    return Choice(
        efforts=tuple(one.effort for one in picked),
        gpu_s=math.fsum(one.gpu_s[i] for i, one in enumerate(picked)) / count,
        log_latency=math.fsum(math.log(max(1e-9, one.latency_s[i])) for i, one in enumerate(picked)) / count,
    )

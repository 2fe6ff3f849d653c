"""Brings every policy of Table B to the same GPU-seconds, by its knob.

Before it: what Keystage used as tuned in a cell (mean over seeds) is the common figure. After it: the
tables compare at equal GPU-seconds. The search is the same for all rivals, on the very seeds of the table.
It brackets the figure and interpolates in logarithms. GPU-seconds move in steps, as replicas do: where two
close efforts lie on either side, some seeds take the one and some the other, so that the mean over seeds
meets the figure. They are not always monotone either (a starved rival drains for long and pays for it), so
of all that is within 2 % the choice with the least latency is taken, to the rival's favour. What cannot be
brought there is taken where its latency is least within 5 % of the nearest it came, and reported. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

TOLERANCE_RATIO = 0.02
NEAR_RATIO = 0.05
LEAST_EFFORT = 0.1
MOST_EFFORT = 12.0
FIRST_STEP = 1.15
MOST_STEP = 2.0
CLOSE = 1.1
"""Efforts no further apart than this may be mixed over the seeds."""
FINEST = 1.004


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    """One effort tried.

    Attributes:
        effort: the knob.
        gpu_s: GPU-seconds by seed.
        latency_s: mean latency by seed.
    """

    effort: float
    gpu_s: tuple[float, ...]
    latency_s: tuple[float, ...]

    @property
    def mean_gpu_s(self) -> float:
        """Mean over seeds."""
        return math.fsum(self.gpu_s) / len(self.gpu_s)


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
        target_gpu_s: the common figure.
        evaluations: most efforts tried.
        first_effort: tried first.
        tried: so far.
    """

    target_gpu_s: float
    evaluations: int
    first_effort: float = 1.0
    tried: list[Try] = dataclasses.field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The best of what is equal, else of what is nearly the nearest."""
        singles = [_mixed([one] * len(one.gpu_s)) for one in self.tried]
        close = (p for p in itertools.pairwise(self._ordered()) if p[1].effort <= CLOSE * p[0].effort)
        mixes = [
            _mixed(picked) for pair in close for picked in itertools.product(pair, repeat=len(pair[0].gpu_s))
        ]
        equal = [choice for choice in singles + mixes if self._is_equal(choice.gpu_s)]
        if equal:
            return min(equal, key=lambda choice: choice.log_latency)
        nearest = min(map(self._distance, singles))
        near = [choice for choice in singles if self._distance(choice) <= nearest + math.log(1 + NEAR_RATIO)]
        return min(near, key=lambda choice: choice.log_latency)

    @property
    def is_equal(self) -> bool:
        """Whether the choice is within 2 %."""
        return bool(self.tried) and self._is_equal(self.choice.gpu_s)

    def next_effort(self) -> float | None:
        """The effort to try next, None when the search is over."""
        if not self.tried:
            return self.first_effort
        if self.is_equal or len(self.tried) >= self.evaluations:
            return None
        ordered = self._ordered()
        sides = [
            (low, high)
            for low, high in itertools.pairwise(ordered)
            if (low.mean_gpu_s < self.target_gpu_s) != (high.mean_gpu_s < self.target_gpu_s)
            and high.effort > FINEST * low.effort
        ]
        if sides:  # nearest to the published policy first
            return self._between(*min(sides, key=lambda pair: abs(math.log(pair[0].effort * pair[1].effort))))
        return self._beyond(ordered)

    def _distance(self, choice: Choice) -> float:
        return abs(math.log(choice.gpu_s / self.target_gpu_s))

    def _ordered(self) -> list[Try]:
        return sorted(self.tried, key=lambda one: one.effort)

    def _is_equal(self, gpu_s: float) -> bool:
        return abs(gpu_s / self.target_gpu_s - 1) <= TOLERANCE_RATIO

    def _between(self, low: Try, high: Try) -> float:
        """Interpolated in logarithms; halved every other time, since steps make interpolation creep."""
        rise = math.log(high.mean_gpu_s / low.mean_gpu_s)
        part = math.log(self.target_gpu_s / low.mean_gpu_s) / rise
        part = 0.5 if len(self.tried) % 2 else min(0.85, max(0.15, part))
        return low.effort * math.exp(part * math.log(high.effort / low.effort))

    def _beyond(self, ordered: Sequence[Try]) -> float | None:
        """All tried lie on one side: further out, in growing steps, while that brings it nearer."""
        is_short = ordered[0].mean_gpu_s < self.target_gpu_s
        outward = list(ordered if is_short else reversed(ordered))
        nearest = min(outward, key=lambda one: abs(math.log(one.mean_gpu_s / self.target_gpu_s)))
        edge = outward[-1]
        if nearest is not edge:  # it turned back: look between, then give up
            after = outward[outward.index(nearest) + 1]
            gap = max(after.effort / nearest.effort, nearest.effort / after.effort)
            return math.sqrt(after.effort * nearest.effort) if gap > CLOSE else None
        step = min(MOST_STEP, FIRST_STEP ** len(outward))
        effort = min(MOST_EFFORT, max(LEAST_EFFORT, edge.effort * (step if is_short else 1 / step)))
        return None if effort == edge.effort else effort


def _mixed(picked: Sequence[Try]) -> Choice:
    """Seed i at the effort of the i-th."""
    count = len(picked)
    return Choice(
        efforts=tuple(one.effort for one in picked),
        gpu_s=math.fsum(one.gpu_s[i] for i, one in enumerate(picked)) / count,
        log_latency=math.fsum(math.log(max(1e-9, one.latency_s[i])) for i, one in enumerate(picked)) / count,
    )

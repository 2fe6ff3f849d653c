"""Paired ratios with intervals, beside the figures QUART printed.

Before it: scores of Keystage and a rival on the same cells and seeds. After it: `paper_tables`. A ratio
is ours divided by theirs: below 1 is better for latencies, above 1 for goodput. A pair is one (cell,
seed): same arrivals, same draws. Models and CVs are the ones the tables name, not a sample of others;
seeds are the sample. So log ratios are averaged over the cells of a group for each seed, and these means
get a Student interval of 95 % over seeds. Beside it a pooled interval takes every (cell, seed) as a
sample, as if the models were a sample of models; what single models lost is listed apart. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from keystage.bench.paper_cells import CV_SLO, TRACE_SLO
from keystage.bench.paper_run import Score

LEVEL = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """What is compared.

    Attributes:
        name: in the tables.
        value: of a score.
        is_less_better: latencies and queues.
    """

    name: str
    value: Callable[[Score], float]
    is_less_better: bool = True


def goodput(score: Score) -> float:
    """Tokens a second within the objective of the score's load: 1.5x on the trace, 5x (lenient) else."""
    return score.goodput(TRACE_SLO if score.run.cell.load == "trace" else CV_SLO)


LATENCY = Measure("latency", lambda score: score.mean_s)
P99 = Measure("p99", lambda score: score.percentile_s(99))
GOODPUT = Measure("goodput", goodput, is_less_better=False)
MEASURES = (LATENCY, P99, GOODPUT)
GPU_S = Measure("gpu_s", lambda score: score.gpu_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of paired ratios.

    Attributes:
        mean: ours / theirs.
        low: lower end of the 95 % interval; with one seed, 0.
        high: upper end; with one seed, infinite.
        by_seed: geometric mean over cells, by seed.
        pooled_low: lower end where every (cell, seed) counts as a sample of its own, so that differences
            between models widen the interval.
        pooled_high: upper end likewise.
    """

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    pooled_low: float = 0.0
    pooled_high: float = math.inf

    @property
    def pooled(self) -> Ratio:
        """The same with the pooled interval."""
        return dataclasses.replace(self, low=self.pooled_low, high=self.pooled_high)

    def is_lost(self, measure: Measure) -> bool:
        """Whether ours is worse, with an interval that excludes 1."""
        return self.low > 1 if measure.is_less_better else self.high < 1

    def is_won(self, measure: Measure) -> bool:
        """Whether ours is better, with an interval that excludes 1."""
        return self.high < 1 if measure.is_less_better else self.low > 1

    @property
    def text(self) -> str:
        """`0.52 [0.48, 0.57]`."""
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio(ours: Sequence[Score], theirs: Sequence[Score], measure: Measure) -> Ratio:
    """Paired over (cell, seed).

    Raises:
        ValueError: the two were not run on the same cells and seeds.
    """
    mine = {(s.run.cell, s.run.seed): measure.value(s) for s in ours}
    other = {(s.run.cell, s.run.seed): measure.value(s) for s in theirs}
    if mine.keys() != other.keys() or not mine:
        raise ValueError(f"pairs differ: {len(mine)} runs of ours, {len(other)} of theirs")
    logs = {key: math.log(_positive(mine[key]) / _positive(other[key])) for key in mine}
    seeds = sorted({seed for _, seed in logs})
    means = [float(np.mean([v for (_, s), v in logs.items() if s == seed])) for seed in seeds]
    mean, half = interval(means)
    by_seed = tuple(math.exp(value) for value in means)
    middle, wide = interval(list(logs.values()))
    low, high = (math.exp(middle + side * wide) for side in (-1, 1))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), by_seed, low, high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % Student interval; infinite for one value."""
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.inf
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error


def _positive(value: float) -> float:
    """A queue or latency of nothing has no logarithm."""
    return max(value, 1e-9)


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """What QUART printed against one rival, as ratios of ours to theirs.

    Attributes:
        latency: mean latency.
        goodput: tokens within the objective.
    """

    latency: float | None
    goodput: float | None


PUBLISHED = {
    ("trace", "infless"): Published(1 - 0.871, 2.19),
    ("trace", "inferline"): Published(1 - 0.705, 2.37),
    ("trace", "cocktail"): Published(1 - 0.367, 2.09),
    ("cv all", "infless"): Published(1 - 0.698, 13.5),
    ("cv all", "inferline"): Published(1 - 0.772, 14.4),
    ("cv all", "cocktail"): Published(1 - 0.478, 2.3),
    ("cv 8", "infless"): Published(None, 17.9),
    ("cv 8", "inferline"): Published(None, 32.4),
    ("cv 8", "cocktail"): Published(None, 3.9),
}
"""QUART section 8.2 (trace: Figure 6a, and 6b at 1.5x) and 8.3 (Figure 7). `cv all`: over all five CVs."""

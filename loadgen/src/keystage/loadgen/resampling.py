"""Intervals of differences between two runs by block bootstrap over time. Pure; `compare` uses it.

Requests that wait in one queue are late together, so single requests must not be resampled: intervals
would be too narrow by far. What is resampled are blocks of time (non-overlapping block bootstrap, Carlstein
1986; Lahiri, Resampling Methods for Dependent Data, 2003, chapter 2). Where both runs had one plan, a block
of the one is drawn together with the same block of the other (paired): both met the same arrivals there, so
what the load does to both cancels out. Else the runs are drawn independently.

Length of a block: four times the time over which latencies stay correlated. With z_b the sum, over the
requests scheduled in bin b (of 300), of their rank minus the mean rank, tau = 1 + 2 sum(rho_k) bins up to the
first k >= 5 tau (Sokal's window); of the paired runs' difference of ranks where paired. Ranks, so that a
heavy tail does not hide correlation. Never more than 100 blocks; below 20 there is no interval.

Interval: percentiles of the replicates, expanded for few blocks (`intervals.expanded_tail`) and, about the
difference itself, by 1 / sqrt(1 - m), m the share of the variance that blocks of L bins lose at their ends:
m = 2 sum(k rho_k) / (L tau), which is (tau^2 - 1) / (2 L tau) where correlation decays exponentially. A
failed request is infinitely late; a replicate whose difference is infinite or undefined moves the ends
outwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from keystage.loadgen.histogram import rounded
from keystage.loadgen.intervals import expanded_tail

Floats = np.typing.NDArray[np.float64]
Counts = np.typing.NDArray[np.int64]

BINS = 300
MIN_BLOCKS = 20
MAX_BLOCKS = 100
BLOCK_TAUS = 4.0
"""At 3, two runs of one queue were called different in 8 % of 400 trials instead of 5 %; at 4 in 6.8 %."""
REPLICATES = 10_000
_CHUNK = 250
_ROUND_ABOVE = 4000
"""Distinct values of a run beyond which they are rounded to 3 digits (0.05 %), to bound the work."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How the time of two runs is cut.

    Attributes:
        count: blocks of equal length.
        block_s: their length.
        correlated_s: how long latencies stay correlated (tau).
        widening: factor on intervals for what blocks lose at their ends.
        is_paired: blocks of both runs are drawn together.
        too_few: why there are too few, in words; empty if there are enough.
    """

    count: int
    block_s: float
    correlated_s: float
    is_paired: bool
    widening: float = 1.0
    too_few: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measure of one run.

    Attributes:
        at_s: scheduled times, any order.
        values: of each request; infinite for a failed one.
    """

    at_s: Floats
    values: Floats


def cut(a: Sample, b: Sample, span_s: float, *, is_paired: bool, block_s: float | None = None) -> Blocks:
    """Decides on blocks.

    Args:
        a: latencies of the one run.
        b: of the other; of the same requests in the same order where paired.
        span_s: length of the schedules.
        is_paired: both had one plan.
        block_s: a length that is asked for; derived if None.
    """
    bin_s = span_s / BINS
    if is_paired:
        pooled = ranks(np.concatenate([a.values, b.values]))
        tau = correlation_bins(binned(a.at_s, pooled[len(a.values) :] - pooled[: len(a.values)], span_s))
    else:
        tau = max(correlation_bins(binned(s.at_s, ranks(s.values), span_s)) for s in (a, b))
    wanted_s = BLOCK_TAUS * tau * bin_s if block_s is None else block_s
    count = min(int(span_s / wanted_s + 1e-9), MAX_BLOCKS)
    too_few = ""
    if count < MIN_BLOCKS:
        why = "as asked" if block_s is not None else f"latencies stay correlated over {tau * bin_s:.3g} s"
        too_few = (
            f"{span_s:.3g} s hold {count} blocks of {wanted_s:.3g} s ({why}), at least {MIN_BLOCKS} are "
            f"needed: a run of {MIN_BLOCKS * wanted_s:.3g} s"
        )
    count = max(count, 1)
    lost = (tau - 1 / tau) / (2 * BINS / count)
    return Blocks(count, span_s / count, tau * bin_s, is_paired, 1 / math.sqrt(1 - min(lost, 0.5)), too_few)


def ranks(values: Floats) -> Floats:
    """Rank of each value, ties share their mean rank, scaled to 0..1."""
    distinct, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts).astype(np.float64)
    middle = (ends - (counts - 1) / 2) / len(values)
    found: Floats = middle[inverse.reshape(-1)]
    return found if len(distinct) > 1 else np.zeros(len(values))


def binned(at_s: Floats, values: Floats, span_s: float) -> Floats:
    """Sums, per bin of time, of values minus their mean."""
    place = np.minimum((at_s / span_s * BINS).astype(np.int64), BINS - 1)
    return np.bincount(place, weights=values - values.mean(), minlength=BINS).astype(np.float64)


def correlation_bins(series: Floats) -> float:
    """Integrated autocorrelation time in bins, at least 1, by Sokal's window of 5."""
    centred = series - series.mean()
    variance = float(centred @ centred)
    if variance <= 0:
        return 1.0
    tau = 1.0
    for k in range(1, len(series) // 2):
        tau += 2 * float(centred[:-k] @ centred[k:]) / variance
        if k >= 5 * tau:
            break
    return max(tau, 1.0)


class Weights:
    """How often each replicate drew each block, for both runs: the same for all measures, by seed."""

    def __init__(self, blocks: Blocks, seed: int, replicates: int = REPLICATES) -> None:
        drawn = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, 7])))
        even = np.full(blocks.count, 1 / blocks.count)
        self.a: Counts = drawn.multinomial(blocks.count, even, replicates).astype(np.int64)
        self.b = self.a
        if not blocks.is_paired:
            self.b = drawn.multinomial(blocks.count, even, replicates).astype(np.int64)
        self.blocks = blocks


def place_of(at_s: Floats, blocks: Blocks) -> Counts:
    """Block of each scheduled time."""
    place: Counts = np.clip((at_s / blocks.block_s).astype(np.int64), 0, blocks.count - 1)
    return place


def quantiles(sample: Sample, weights: Counts, blocks: Blocks, shares: Sequence[float]) -> Floats:
    """Nearest-rank quantiles of each replicate, shape (replicates, shares); NaN where it drew no request."""
    values = sample.values
    distinct, inverse = np.unique(values, return_inverse=True)
    if len(distinct) > _ROUND_ABOVE:
        distinct, inverse = np.unique(rounded(values), return_inverse=True)
    # Whole numbers up to 2^24 are exact in 32 bits; a replicate of more requests takes 64.
    exact = np.float32 if len(values) * blocks.count < 1 << 24 else np.float64
    table = np.zeros((blocks.count, len(distinct)), dtype=exact)
    np.add.at(table, (place_of(sample.at_s, blocks), inverse.reshape(-1)), 1)
    made = np.empty((len(weights), len(shares)))
    for begin in range(0, len(weights), _CHUNK):
        ends = np.cumsum(weights[begin : begin + _CHUNK].astype(exact) @ table, axis=1)
        for k, row in enumerate(ends):
            total = float(row[-1])
            places = row.searchsorted([max(math.ceil(share * total - 1e-9), 1) for share in shares])
            made[begin + k] = distinct[np.minimum(places, len(distinct) - 1)] if total else math.nan
    return made


def means(sample: Sample, weights: Counts, blocks: Blocks) -> Floats:
    """Mean of each replicate over finite values; NaN where it drew none."""
    place, finite = place_of(sample.at_s, blocks), np.isfinite(sample.values)
    sums = np.bincount(place[finite], weights=sample.values[finite], minlength=blocks.count)
    counts = np.bincount(place[finite], minlength=blocks.count)
    with np.errstate(invalid="ignore", divide="ignore"):
        made: Floats = (weights @ sums) / (weights @ counts)
    return made


def totals(sample: Sample, weights: Counts, blocks: Blocks) -> Floats:
    """Sum of each replicate."""
    sums = np.bincount(place_of(sample.at_s, blocks), weights=sample.values, minlength=blocks.count)
    return np.asarray(weights @ sums, dtype=np.float64)


def interval(differences: Floats, point: float, alpha: float, blocks: Blocks) -> tuple[float, float]:
    """Ends between which the difference lies but for alpha; infinite where replicates do not bound it.

    Args:
        differences: of the replicates.
        point: difference of the runs themselves.
        alpha: error probability.
        blocks: what was drawn.
    """
    tail = expanded_tail(alpha, blocks.count)
    low = np.sort(np.where(np.isnan(differences), -math.inf, differences))
    high = np.sort(np.where(np.isnan(differences), math.inf, differences))
    place = max(math.floor(tail * len(differences)) - 1, 0)
    begin, end = float(low[place]), float(high[len(high) - 1 - place])
    wider = blocks.widening
    return min(begin, point + wider * (begin - point)), max(end, point + wider * (end - point))


def spread(a: Sample, b: Sample, weights: Weights, of: Callable[[Sample, Counts, Blocks], Floats]) -> Floats:
    """Differences b - a of a statistic over all replicates."""
    with np.errstate(invalid="ignore"):
        made: Floats = of(b, weights.b, weights.blocks) - of(a, weights.a, weights.blocks)
    return made

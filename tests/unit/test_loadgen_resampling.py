"""Blocks, replicates and intervals of the bootstrap, by hand and against simple programs."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from support.load_reports import times

from keystage.loadgen import resampling
from keystage.loadgen.resampling import Blocks, Sample, Weights


def sample(at_s: list[float], values: list[float]) -> Sample:
    return Sample(np.array(at_s), np.array(values))


def noise(seed: int, count: int, span_s: float = 60.0) -> Sample:
    return sample(times(count, seed, span_s), np.random.RandomState(seed).exponential(1.0, count).tolist())


def test_ranks_share_ties_and_failures_are_last() -> None:
    got = resampling.ranks(np.array([3.0, 1.0, math.inf, 1.0]))
    assert got.tolist() == [3 / 4, 1.5 / 4, 4 / 4, 1.5 / 4]
    assert resampling.ranks(np.array([2.0, 2.0])).tolist() == [0, 0]


def test_independent_requests_are_cut_into_many_blocks() -> None:
    cut = resampling.cut(noise(1, 3000), noise(2, 3000), 60.0, is_paired=False)
    assert 50 <= cut.count <= resampling.MAX_BLOCKS
    assert cut.too_few == ""
    assert cut.block_s == 60.0 / cut.count


def test_a_block_is_four_times_as_long_as_latencies_stay_correlated() -> None:
    """An AR(1) process in time, by bin, with phi 0.6: tau = (1 + phi) / (1 - phi) = 4 bins."""
    drawn, level, values, at_s = np.random.RandomState(5), 0.0, [], []
    for k in range(resampling.BINS):
        level = 0.6 * level + float(drawn.normal())
        values += [10 + level] * 10
        at_s += [(k + (j + 0.5) / 10) / resampling.BINS * 600 for j in range(10)]
    cut = resampling.cut(sample(at_s, values), noise(3, 3000, 600.0), 600.0, is_paired=False)
    assert cut.correlated_s == pytest.approx(4 * 2.0, rel=0.35)
    assert cut.block_s == pytest.approx(4 * cut.correlated_s, rel=0.1)
    assert cut.widening == pytest.approx(1 / math.sqrt(1 - (1 - 1 / 16) / 8), rel=0.03)


def test_what_the_load_does_to_both_cancels_out_where_paired() -> None:
    at_s = times(3000, 9, 600.0)
    level, levels = 0.0, []
    for step in np.random.RandomState(4).normal(size=300).tolist():
        level = 0.95 * level + step
        levels.append(level)
    wave = np.array(levels)[(np.array(at_s) / 2).astype(int)]
    both = [
        sample(at_s, (3 + wave + 0.1 * np.random.RandomState(seed).normal(size=3000)).tolist())
        for seed in (1, 2)
    ]
    alone = resampling.cut(*both, 600.0, is_paired=False)
    paired = resampling.cut(*both, 600.0, is_paired=True)
    assert alone.too_few.startswith("600 s hold")
    assert "at least 20 are needed" in alone.too_few
    assert paired.too_few == ""
    assert paired.correlated_s < alone.correlated_s / 3


def test_a_length_that_is_asked_for() -> None:
    one, other = noise(1, 500), noise(2, 500)
    assert resampling.cut(one, other, 60.0, is_paired=True, block_s=2.0).count == 30
    assert "(as asked)" in resampling.cut(one, other, 60.0, is_paired=True, block_s=5.0).too_few


def expanded(of: Sample, drawn: list[int], blocks: Blocks) -> list[float]:
    """A replicate written out: every value as often as its block was drawn."""
    place = resampling.place_of(of.at_s, blocks)
    return sorted(v for v, b in zip(of.values.tolist(), place, strict=True) for _ in range(drawn[b]))


def test_replicates_are_those_of_the_blocks_written_out() -> None:
    of, blocks = noise(4, 200), Blocks(20, 3.0, 1.0, is_paired=True)
    of.values[::17] = math.inf
    weights = Weights(blocks, 3, 40)
    assert (weights.a.sum(axis=1) == 20).all()
    assert weights.b is weights.a
    ranks = resampling.quantiles(of, weights.a, blocks, [0.5, 0.99])
    means = resampling.means(of, weights.a, blocks)
    sums = resampling.totals(Sample(of.at_s, np.ones(200)), weights.a, blocks)
    for k in range(40):
        values = expanded(of, weights.a[k].tolist(), blocks)
        assert ranks[k].tolist() == [values[math.ceil(p * len(values)) - 1] for p in (0.5, 0.99)]
        assert means[k] == pytest.approx(statistics.fmean(v for v in values if math.isfinite(v)))
        assert sums[k] == len(values)


def test_many_values_are_rounded_to_three_digits() -> None:
    of, blocks = noise(6, 9000), Blocks(50, 1.2, 0.2, is_paired=False)
    weights = Weights(blocks, 1, 5)
    got = resampling.quantiles(of, weights.b, blocks, [0.5])
    for k in range(5):
        values = expanded(of, weights.b[k].tolist(), blocks)
        assert got[k, 0] == pytest.approx(values[math.ceil(0.5 * len(values)) - 1], rel=1 / 2048)


def test_unpaired_runs_are_drawn_apart_and_a_seed_repeats() -> None:
    blocks = Blocks(30, 2.0, 0.5, is_paired=False)
    one, again = Weights(blocks, 1, 100), Weights(blocks, 1, 100)
    assert (one.a == again.a).all()
    assert (one.a != one.b).any()
    assert (one.a != Weights(blocks, 2, 100).a).any()


def test_replicates_that_bound_nothing_move_the_ends_outwards() -> None:
    drawn = np.linspace(-1.0, 1.0, 1001)
    blocks = Blocks(1000, 0.06, 0.02, is_paired=True)
    low, high = resampling.interval(drawn, 0.0, 0.05, blocks)
    assert (low, high) == pytest.approx((-0.95, 0.95), abs=0.01)
    wider = resampling.interval(drawn, 0.5, 0.05, dataclasses.replace(blocks, widening=2.0))
    assert wider == pytest.approx((0.5 - 2 * 1.45, 0.5 + 2 * 0.45), abs=0.02)
    drawn[:30] = math.nan
    assert resampling.interval(drawn, 0.0, 0.05, blocks) == (-math.inf, math.inf)
    drawn[:30] = math.inf
    low, high = resampling.interval(drawn, 0.0, 0.05, blocks)
    assert math.isfinite(low)
    assert high == math.inf

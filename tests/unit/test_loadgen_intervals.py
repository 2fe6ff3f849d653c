"""Exact intervals of shares and quantiles of distributions, against SciPy and by counting."""

import math

import pytest
from scipy import stats

from keystage.loadgen import intervals


@pytest.mark.parametrize("a", [0.5, 1.0, 3.0, 40.0, 1e4, 5e5])
@pytest.mark.parametrize("b", [0.5, 2.0, 17.0, 9e3, 5e5])
@pytest.mark.parametrize("probability", [1e-4, 0.025, 0.5, 0.975])
def test_beta_quantiles_are_those_of_scipy(a: float, b: float, probability: float) -> None:
    want = stats.beta.ppf(probability, a, b)
    assert intervals.beta_quantile(probability, a, b) == pytest.approx(want, rel=1e-7, abs=1e-12)


def test_beta_ends() -> None:
    assert (intervals.beta_cdf(-1, 2, 3), intervals.beta_cdf(2, 2, 3)) == (0.0, 1.0)


@pytest.mark.parametrize("degrees", [1, 5, 19, 99])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.975, 0.9995])
def test_student_quantiles_are_those_of_scipy(degrees: int, probability: float) -> None:
    want = stats.t.ppf(probability, degrees)
    assert intervals.student_quantile(probability, degrees) == pytest.approx(want, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize(("successes", "count"), [(0, 1), (0, 50), (3, 40), (40, 40), (700, 1_000_000)])
def test_clopper_pearson_is_that_of_scipy(successes: int, count: int) -> None:
    want = stats.binomtest(successes, count).proportion_ci(0.99, "exact")
    got = intervals.clopper_pearson(successes, count, 0.01)
    assert got == pytest.approx((want.low, want.high), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("share_a", "share_b"), [(0.0, 0.0), (0.02, 0.02), (0.1, 0.3), (0.5, 0.97)])
def test_a_difference_of_shares_is_held_at_least_as_often_as_said(share_a: float, share_b: float) -> None:
    """By summing over all outcomes of 20 and 30 requests: no sampling, no tolerance."""
    held = 0.0
    for k in range(21):
        for m in range(31):
            low, high = intervals.share_difference((k, 20), (m, 30), 0.05)
            if low <= share_b - share_a <= high:
                held += stats.binom.pmf(k, 20, share_a) * stats.binom.pmf(m, 30, share_b)
    assert held >= 0.95


def test_few_blocks_need_a_smaller_tail() -> None:
    tails = [intervals.expanded_tail(0.05, blocks) for blocks in (20, 100, 100_000)]
    assert tails == sorted(tails)
    assert tails[0] == pytest.approx(stats.norm.cdf(-math.sqrt(20 / 19) * stats.t.ppf(0.975, 19)), rel=1e-6)
    assert tails[2] == pytest.approx(0.025, rel=1e-3)


@pytest.mark.parametrize(("successes", "count"), [(1, 0), (5, 4), (-1, 4)])
def test_what_is_no_share(successes: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"got {successes} of {count}"):
        intervals.clopper_pearson(successes, count, 0.05)


def test_what_is_no_quantile_of_t() -> None:
    with pytest.raises(ValueError, match=r"got 0\.4"):
        intervals.student_quantile(0.4, 3)

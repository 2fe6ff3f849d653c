"""Arrivals within the minute: laws, bounds, independence of functions and minutes."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from keystage.loadgen.traces import within

FUNCTIONS = 4000
KEYS = np.array([within.key(5, f"a/f{k}") for k in range(FUNCTIONS)], np.uint64)

KEYS_FROZEN = [8017999322641283742, 247496101748057662]
POISSON_FROZEN = [12.40144023543955, 38.07793429131489, 21.742601187731626]
GAMMA_FROZEN = [47.193285625107066, 47.644068631488324, 12.519424868432935]
DRAWS_FROZEN = [0.938333409334526, 0.08387259262662394]


def placed(count: int, way: str, minute: int = 480) -> npt.NDArray[np.float64]:
    """Sorted arrivals of each function, shape (FUNCTIONS, count)."""
    counts = np.full(FUNCTIONS, count)
    times = within.place(KEYS, counts, minute, within.parse_within(way))
    return np.sort(times.reshape(FUNCTIONS, count), axis=1)


def test_uniform_is_even_spacing_and_one_phase_a_function() -> None:
    times = placed(5, "uniform")
    assert np.diff(times, axis=1) == pytest.approx(12.0)
    assert stats.kstest(times[:, 0] / 12, "uniform").pvalue > 0.001
    assert times == pytest.approx(placed(5, "uniform", minute=481))


@pytest.mark.parametrize("way", ["poisson", "gamma:1.0000001"])
def test_poisson_is_the_order_statistics_of_uniform_times(way: str) -> None:
    """The k-th of 4 is Beta(k, 5 - k); gamma gaps of CV 1 have the same law."""
    times = placed(4, way) / 60
    for k in range(4):
        assert stats.kstest(times[:, k], "beta", args=(k + 1, 4 - k)).pvalue > 0.001


@pytest.mark.parametrize("cv", [0.25, 0.5, 2.0, 4.0])
def test_gamma_gaps_have_the_cv(cv: float) -> None:
    """Of 200 Dirichlet gaps E[cv^2] = n (k + 1) / (n k + 1) - 1, exactly (k = 1 / CV^2)."""
    n, k = 200, 1 / cv**2
    times = placed(n, f"gamma:{cv}")
    gaps = np.diff(times, axis=1, append=times[:, :1] + 60)
    squares = gaps.var(axis=1) / gaps.mean(axis=1) ** 2
    expected = n * (k + 1) / (n * k + 1) - 1
    error = squares.std() / np.sqrt(FUNCTIONS)
    assert abs(squares.mean() - expected) < 4 * error


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("way", ["gamma:0.1", "gamma:0.5", "gamma:4"])
def test_every_time_of_the_minute_is_as_likely(count: int, way: str) -> None:
    """Functions do not meet at one second, as they would where gaps begin with the minute."""
    functions = np.arange(FUNCTIONS)
    one_each = placed(count, way)[functions, functions % count]
    assert stats.kstest(one_each / 60, "uniform").pvalue > 0.001


@pytest.mark.parametrize("way", ["poisson", "gamma:0.5", "gamma:4"])
def test_minutes_and_functions_are_independent(way: str) -> None:
    one, other = placed(1, way)[:, 0], placed(1, way, minute=481)[:, 0]
    bound = 4 / np.sqrt(FUNCTIONS)
    assert abs(np.corrcoef(one, other)[0, 1]) < bound
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < bound
    assert len(np.unique(one)) > 0.9 * FUNCTIONS


@pytest.mark.parametrize("cv", [1e-5, 0.01, 10.0, within.MAX_CV])
def test_extreme_variation_stays_within_the_minute(cv: float) -> None:
    for count in (1, 30):
        times = placed(count, f"gamma:{cv}")
        assert np.isfinite(times).all()
        assert (times >= 0).all()
        assert (times <= 60).all()


def test_rounding_never_reaches_the_next_minute() -> None:
    times = within.in_minute(np.array([0.0, 59.999999999999996, 60.0]), 86_340.0)
    assert times[0] == 86_340.0
    assert (times < 86_400.0).all()


def test_the_numbers_are_frozen() -> None:
    """A seed means the same arrivals with every release."""
    keys = np.array([within.key(0, "a/f"), within.key(0, "a/f", 1)], np.uint64)
    assert keys.tolist() == KEYS_FROZEN
    found = within.place(keys, np.array([2, 1]), 480, 1.0)
    assert found == pytest.approx(POISSON_FROZEN, abs=1e-12)
    assert within.place(keys, np.array([2, 1]), 480, 4.0) == pytest.approx(GAMMA_FROZEN, abs=1e-9)
    assert within.draws(keys, np.array([1, 1]), 480) == pytest.approx(DRAWS_FROZEN, abs=1e-15)

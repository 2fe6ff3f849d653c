"""Gamma arrivals have the CV that was asked for, and a report claims one only where it can.

What chance does to these tests: with 50 seeds and a 99 % interval, more than 5 outside have a probability
of 1.0e-5 (binomial); a mean of squares more than 4.6 standard errors off, 4.2e-6. Over the five CVs both
together fail by chance less than once in 10^4 times.
"""

import math

import numpy as np
import pytest

from keystage.loadgen import arrivals
from keystage.loadgen.arrivals_process import gamma
from keystage.loadgen.arrivals_spec import parse

SEEDS = 50
MOST_OUTSIDE = 5
MOST_ERRORS = 4.6
CVS = (0.1, 1.0, 2.0, 4.0, 8.0)
DURATION_S = 600.0


def squares(cv: float, count: int) -> list[float]:
    read = []
    for seed in range(SEEDS):
        times = gamma(cv).times(count / DURATION_S, DURATION_S, seed)
        assert len(times) == count
        achieved = arrivals.spacing(times, DURATION_S).cv
        assert achieved is not None
        read.append(achieved**2)
    return read


def outside(read: list[float], cv: float, count: int) -> int:
    low, high = arrivals.cv_interval(cv, count - 1, 0.99)
    return sum(not low <= math.sqrt(square) <= high for square in read)


@pytest.mark.parametrize("cv", CVS)
def test_achieved_cv_lies_in_its_sampling_interval(cv: float) -> None:
    count = arrivals.arrivals_for_cv(cv)
    read = squares(cv, count)
    assert outside(read, cv, count) <= MOST_OUTSIDE
    mean, deviation = arrivals.scv_moments(cv, count - 1)
    assert abs(np.mean(read) - mean) <= MOST_ERRORS * deviation / math.sqrt(SEEDS)


@pytest.mark.parametrize("cv", [2.0, 4.0])
def test_a_cv_taken_for_the_shape_is_found_out(cv: float) -> None:
    """The usual mistake: shape = cv gives gaps of CV 1/sqrt(cv)."""
    count = arrivals.arrivals_for_cv(cv)
    assert outside(squares(1 / math.sqrt(cv), count), cv, count) == SEEDS


@pytest.mark.parametrize("cv", [0.1, 1.0, 2.0])
def test_the_interval_holds_what_it_says(cv: float) -> None:
    """Against plain draws of another generator: 4,000 samples, 99 % inside within 4.5 standard errors."""
    count, draws = arrivals.arrivals_for_cv(cv), 4000 if cv <= 1 else 1000
    low, high = arrivals.cv_interval(cv, count, 0.99)
    source = np.random.Generator(np.random.PCG64(7))
    read = [
        sample.std() / sample.mean() for sample in (source.gamma(cv**-2, 1.0, count) for _ in range(draws))
    ]
    missed = sum(not low <= value <= high for value in read)
    assert abs(missed - 0.01 * draws) <= 4.5 * math.sqrt(0.01 * 0.99 * draws)
    assert 0 < sum(value < low for value in read) < missed


def test_a_claim_takes_2000_cv_squared_arrivals() -> None:
    assert [arrivals.arrivals_for_cv(cv) for cv in (0.0, 0.1, 1.0, 4.0, 8.0)] == [
        3,
        200,
        2000,
        32_000,
        128_000,
    ]
    times = gamma(4.0).times(10.0, 60.0, 1)
    spacing = arrivals.spacing(times, 60.0)
    assert not spacing.is_claimed(4.0)
    assert spacing.arrivals_needed(4.0) == 32_000
    long = arrivals.spacing(gamma(4.0).times(3200.0, 10.0, 1), 10.0)
    assert long.is_claimed(4.0)
    # A trace has no CV that was asked: the one that was read stands for it.
    assert spacing.cv is not None
    assert spacing.arrivals_needed() == arrivals.arrivals_for_cv(spacing.cv)
    assert arrivals.spacing(np.array([1.0]), 1.0).arrivals_needed() is None


def test_rate_and_cv_are_the_gamma_process() -> None:
    for cv, text in ((4.0, "gamma:cv=4"), (1.0, "poisson"), (0.0, "constant"), (0.5, "gamma:cv=0.5")):
        assert np.array_equal(parse(text).times(7.3, 60.0, 5), arrivals.synthetic(7.3, cv, 60.0, 5))
        assert parse(text).cv == cv

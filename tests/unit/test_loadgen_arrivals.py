"""Arrival times: exact counts and spans, reproducible seeds, and CVs within their sampling error."""

import math

import numpy as np
import pytest

from keystage.loadgen import arrivals


def test_a_run_spans_its_duration_exactly() -> None:
    times = arrivals.synthetic(7.3, 4.0, 60.0, 5)
    assert len(times) == 438
    assert times[-1] == 60.0
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0


def test_a_seed_is_a_run() -> None:
    assert np.array_equal(arrivals.synthetic(5, 4, 20, 1), arrivals.synthetic(5, 4, 20, 1))
    assert not np.array_equal(arrivals.synthetic(5, 4, 20, 1), arrivals.synthetic(5, 4, 20, 2))
    assert not np.array_equal(arrivals.synthetic(5, 4, 20, 1), arrivals.synthetic(5, 4, 20, 1 + 2**40))


def test_streams_of_one_seed_are_apart() -> None:
    assert arrivals.stream(3, 1).uniform() != arrivals.stream(3, 2).uniform()


def test_cv_zero_is_constant_spacing() -> None:
    assert arrivals.synthetic(4, 0, 2, 9) == pytest.approx([0.25 * i for i in range(1, 9)])


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("count", [60, 600])
def test_cv_over_seeds_lies_in_its_sampling_interval(cv: float, count: int) -> None:
    """The mean of cv^2 over seeds against its exact expectation and standard error."""
    seeds = 400
    read = [arrivals.spacing(arrivals.synthetic(count, cv, 1.0, seed), 1.0).cv for seed in range(seeds)]
    squares = [value * value for value in read if value is not None]
    assert len(squares) == seeds
    mean, deviation = arrivals.scv_moments(cv, count - 1)
    assert abs(np.mean(squares) - mean) < 4 * deviation / math.sqrt(seeds)
    assert np.std(squares) == pytest.approx(deviation, rel=0.35)


def test_rescaling_keeps_the_cv() -> None:
    gaps = arrivals.gaps(500, 4.0, 11)
    times = arrivals.synthetic(500 / 60, 4.0, 60.0, 11)
    scaled = np.diff(times, prepend=0.0)
    assert scaled.std() / scaled.mean() == pytest.approx(gaps.std() / gaps.mean())


def test_interval_covers_about_95_percent_of_fresh_seeds() -> None:
    low, high = arrivals.cv_interval(4.0, 200)
    read = [arrivals.spacing(arrivals.synthetic(201, 4.0, 1.0, seed), 1.0).cv or 0.0 for seed in range(400)]
    inside = sum(low <= value <= high for value in read)
    # Binomial(400, 0.95): mean 380, standard deviation 4.4.
    assert 362 <= inside <= 396
    assert low < 4.0 < high


def test_trace_at_a_rate_keeps_the_shape() -> None:
    offsets = [10.0, 11.0, 11.5, 20.0, 21.0]
    times = arrivals.at_rate(offsets, 2.0)
    assert times[-1] == pytest.approx(2.5)
    assert times / times[-1] == pytest.approx((np.array(offsets) - 10) / 11)
    assert arrivals.spacing(times, 2.5).rate_rps == pytest.approx(2.0)


def test_trace_at_a_rate_for_a_time_takes_the_first_arrivals() -> None:
    times = arrivals.at_rate([0.0, 1.0, 3.0, 100.0], 0.5, 6.0)
    assert times == pytest.approx([0.0, 2.0, 6.0])
    assert len(arrivals.at_rate([0.0, 1.0], 1.0, 60.0)) == 2


def test_spacing_by_hand() -> None:
    got = arrivals.spacing(np.array([1.0, 4.0, 2.0]), 6.0)
    assert (got.count, got.rate_rps) == (3, 0.5)
    assert got.cv == pytest.approx(0.5 / 1.5)
    assert arrivals.spacing(np.array([3.0, 9.0]), 6.0) == arrivals.Spacing(2, 2 / 9, None)
    assert arrivals.spacing(np.array([]), 6.0) == arrivals.Spacing(0, 0.0, None)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bounds_are_named(bad: float) -> None:
    with pytest.raises(arrivals.ArrivalError, match="rate must be finite and above 0"):
        arrivals.synthetic(bad, 1.0, 1.0, 0)
    with pytest.raises(arrivals.ArrivalError, match="duration must"):
        arrivals.synthetic(1.0, 1.0, bad, 0)


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(arrivals.ArrivalError, match="no arrival"):
        arrivals.synthetic(0.1, 1.0, 1.0, 0)
    with pytest.raises(arrivals.ArrivalError, match="cv must"):
        arrivals.gaps(3, -1.0, 0)
    with pytest.raises(arrivals.ArrivalError, match="share one timestamp"):
        arrivals.at_rate([2.0, 2.0], 1.0)
    with pytest.raises(arrivals.ArrivalError, match="no arrival"):
        arrivals.at_rate([], 1.0)
    with pytest.raises(arrivals.ArrivalError, match=r"cv must be in 0..100, got 1e\+200"):
        arrivals.synthetic(5.0, 1e200, 1.0, 0)
    with pytest.raises(arrivals.ArrivalError, match="gives inf arrivals, at most 20000000"):
        arrivals.synthetic(1e300, 1.0, 1e300, 0)

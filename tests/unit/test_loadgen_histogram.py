"""Buckets, quantiles and records of the load generator's histogram, by hand."""

import dataclasses
import math

import numpy as np
import pytest

from keystage.loadgen.histogram import (
    MAX_S,
    UNIT_S,
    Histogram,
    HistogramError,
    bounds_s,
    index_of,
    merged,
    rounded,
)


@pytest.mark.parametrize(
    ("value_s", "index"),
    [(0.0, 0), (0.5e-6, 0), (1e-6, 1), (2**-20, 1), (1.001e-6, 2), (2.001e-6, 1025), (4.002e-6, 2049)],
)
def test_buckets(value_s: float, index: int) -> None:
    low_s, high_s = bounds_s(index_of(value_s))
    assert low_s <= value_s < high_s
    assert abs(index_of(value_s) - index) <= (value_s == 2**-20)


def test_nearest_rank_over_failures() -> None:
    made = Histogram.of([0.001 * k for k in range(1, 91)], failed=10)
    assert (made.count, made.failed) == (100, 10)
    assert made.quantile(0.5) == pytest.approx(0.050, rel=1 / 2048)
    assert made.quantile(0.9) == pytest.approx(0.090, rel=1 / 2048)
    assert made.quantile(0.91) is None
    assert (made.mean_s, made.max_s) == (pytest.approx(0.0455), 0.09)


def test_nothing_has_no_quantile() -> None:
    empty = Histogram()
    assert (empty.quantile(0.5), empty.mean_s, empty.max_s, list(empty)) == (None, None, None, [])
    assert merged([]) == empty
    assert empty != "a histogram"


def test_a_clock_that_is_behind_counts_as_no_time() -> None:
    made = Histogram.of([-0.5])
    assert (made.quantile(0.5), list(made)) == (0.0, [(0.0, UNIT_S, 1)])


@pytest.mark.parametrize("value_s", [math.nan, math.inf, 2 * MAX_S])
def test_what_is_no_time_is_refused(value_s: float) -> None:
    with pytest.raises(HistogramError, match="must be a number up to 1e"):
        Histogram().record(value_s)


def test_a_probability_is_one() -> None:
    with pytest.raises(HistogramError, match=r"in 0..1, got 99"):
        Histogram().quantile(99)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"unit_s": 1e-3}, "only 1e-06 s and 1024 can be merged"),
        ({"buckets": "1:x"}, "invalid literal"),
        ({"buckets": "-1:4"}, "an index below 0"),
        ({"buckets": "3:0"}, "a count below 1"),
        ({"min_s": None}, "lacks its least"),
    ],
)
def test_a_record_that_is_none(change: dict[str, object], told: str) -> None:
    good = Histogram.of([0.1, 0.2]).record_of()
    with pytest.raises(HistogramError, match=told):
        Histogram.from_record(dataclasses.replace(good, **change))  # type: ignore[arg-type]


def test_rounded_values_are_the_middles_of_their_buckets() -> None:
    values = np.array([3e-7, 1e-6, 0.0123, 1.0, 77.7, math.inf])
    for value, middle in zip(values.tolist(), rounded(values).tolist(), strict=True):
        low_s, high_s = (math.inf, math.inf) if math.isinf(value) else bounds_s(index_of(value))
        assert middle == pytest.approx((low_s + high_s) / 2, rel=1e-12)

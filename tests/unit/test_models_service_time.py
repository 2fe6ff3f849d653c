"""The service time's line: least squares, with no negative coefficient."""

from __future__ import annotations

import numpy as np
import pytest

from keystage.models.service_time import fit, fit_repeats, median_ratio


@pytest.mark.parametrize(
    ("batches", "seconds", "expected"),
    [
        ([1, 2, 4, 8], [0.3, 0.5, 0.9, 1.7], (0.2, 0.1)),
        ([1, 2, 4], [1.0, 1.0, 1.0], (0.0, 1.0)),
        ([1, 2, 3], [3.0, 2.0, 1.0], (0.0, 2.0)),
        ([1, 2, 3], [0.0, 1.0, 2.0], (8 / 14, 0.0)),
        ([1, 1, 3], [1.0, 3.0, 4.0], (1.0, 1.0)),
    ],
)
def test_fit(batches: list[int], seconds: list[float], expected: tuple[float, float]) -> None:
    assert fit(batches, seconds) == pytest.approx(expected)


@pytest.mark.parametrize(("batches", "seconds"), [([2, 2], [1.0, 1.0]), ([1, 2], [1.0]), ([], [])])
def test_too_little_to_fit(batches: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        fit(batches, seconds)


def test_the_line_of_repeats_goes_through_their_medians_and_knows_its_error() -> None:
    noise = [0.0, 0.01, -0.01, 0.005, -0.005, 5.0, 0.0, 0.002, -0.002]  # one run that was held up
    line = fit_repeats({b: [0.2 * b + 0.1 + e for e in noise] for b in (1, 2, 4, 8)})
    assert (line.alpha_s, line.beta_s) == pytest.approx((0.2, 0.1), abs=0.01)
    assert 0 < line.alpha_error_s < 0.05
    assert 0 < line.beta_error_s < 0.2
    assert line.misfit_ratio < 0.05


def test_repeats_that_agree_have_no_error_and_a_curve_shows_as_misfit() -> None:
    line = fit_repeats({b: [float(b * b)] * 3 for b in (1, 2, 4)})
    assert (line.alpha_error_s, line.beta_error_s) == (0, 0)
    assert line.misfit_ratio > 0.2


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        samples = {b: list(1.0 + 0.5 * b + random.normal(0, 0.05, 9)) for b in (1, 2, 4, 8)}
        line = fit_repeats(samples)
        hits += abs(line.alpha_s - 0.5) <= line.alpha_error_s
    assert 180 <= hits <= 200


@pytest.mark.parametrize("samples", [{1: [1.0]}, {1: [1.0], 2: []}, {}])
def test_too_few_repeats_to_fit(samples: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        fit_repeats(samples)


def test_a_ratio_of_medians_lies_in_its_interval() -> None:
    ratio, low, high = median_ratio([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.0, 2.2])
    assert ratio == pytest.approx(0.5)
    assert low <= ratio <= high < 0.65

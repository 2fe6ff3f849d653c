"""The line l(b) = alpha b + beta through measured times of batches: least squares, with error bars.

Symbols: b rows per batch (or tokens of a chunk), l(b) seconds, alpha seconds per row, beta seconds per
batch. Valid in the range of batches that was measured. Pure arithmetic: `models.profile` measures.

The line goes through the medians of the repeats, because a machine that does something else delays some
runs and hastens none. Its 95 % intervals are of the same estimator by bootstrap (Efron 1979, percentile
method): the repeats of every batch size are drawn again with replacement and the line is laid through
their medians, many times; the interval holds the middle 95 % of what comes out. They tell how well the
measurement repeats, not how straight the curve is: that is what `misfit_ratio` is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RESAMPLES = 1000
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line.

    Attributes:
        alpha_s: seconds per row.
        beta_s: seconds per batch.
        alpha_error_s: half the width of alpha's 95 % interval.
        beta_error_s: half the width of beta's 95 % interval.
        misfit_ratio: largest distance of a median from the line, over that median.
    """

    alpha_s: float
    beta_s: float
    alpha_error_s: float
    beta_error_s: float
    misfit_ratio: float


def fit(batches: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits alpha and beta.

    A fit with a negative coefficient is replaced by the best one that has it at 0, since a
    service time grows with its batch and an empty batch costs no less than nothing.

    Args:
        batches: rows per batch, at least two different sizes.
        seconds: time of each batch, above 0.

    Returns:
        (alpha in seconds per row, beta in seconds per batch).

    Raises:
        ValueError: fewer than two different sizes, or lengths that differ.
    """
    if len(batches) != len(seconds) or len(set(batches)) < 2:
        raise ValueError(f"two batch sizes and as many times are needed, got {batches} and {seconds}")
    alphas, betas = _lines(np.asarray(batches, float), np.asarray(seconds, float)[np.newaxis])
    return float(alphas[0]), float(betas[0])


def fit_repeats(samples: Mapping[int, Sequence[float]]) -> Line:
    """Fits the line through repeated measurements, with intervals.

    Args:
        samples: seconds of every repeat by batch size, at least two sizes with one repeat each.

    Raises:
        ValueError: fewer than two sizes, or one without a repeat.
    """
    if len(samples) < 2 or not all(len(times) for times in samples.values()):
        counts = {size: len(times) for size, times in samples.items()}
        raise ValueError(f"two batch sizes with a time each are needed, got repeats {counts}")
    sizes = np.array(sorted(samples), float)
    medians = np.array([np.median(samples[int(size)]) for size in sizes])
    alphas, betas = _lines(sizes, medians[np.newaxis])
    random = np.random.default_rng(0)
    drawn = np.stack([_medians_again(np.asarray(samples[int(size)], float), random) for size in sizes], 1)
    alpha_range, beta_range = (np.percentile(found, _TAILS) for found in _lines(sizes, drawn))
    line = alphas[0] * sizes + betas[0]
    return Line(
        float(alphas[0]),
        float(betas[0]),
        float(alpha_range[1] - alpha_range[0]) / 2,
        float(beta_range[1] - beta_range[0]) / 2,
        float(np.max(np.abs(medians - line) / medians)),
    )


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median of one set of times over that of another, with its 95 % interval (bootstrap, see above).

    Args:
        ours: seconds, at least one.
        theirs: seconds, at least one, above 0.
    """
    random = np.random.default_rng(0)
    ratios = _medians_again(np.asarray(ours, float), random)
    ratios = ratios / _medians_again(np.asarray(theirs, float), random)
    low, high = np.percentile(ratios, _TAILS)
    return float(np.median(ours) / np.median(theirs)), float(low), float(high)


def _medians_again(times: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Medians of the times drawn again with replacement, [resamples]."""
    chosen = random.integers(len(times), size=(_RESAMPLES, len(times)))
    return np.asarray(np.median(times[chosen], axis=1))


def _lines(
    sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Alphas and betas [n] through times [n, sizes]; where one is negative, the best with it at 0."""
    spread = sizes - sizes.mean()
    means = times.mean(axis=1)
    alphas = times @ spread / (spread @ spread)
    betas = means - alphas * sizes.mean()
    through_zero = times @ sizes / (sizes @ sizes)
    is_falling, is_below = alphas < 0, betas < 0
    alphas = np.where(is_falling, 0.0, np.where(is_below, through_zero, alphas))
    betas = np.where(is_falling, means, np.where(is_below, 0.0, betas))
    return alphas, betas

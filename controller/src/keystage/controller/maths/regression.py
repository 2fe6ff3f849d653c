"""Ordinary least squares with 95 % intervals.

Before it: rows of a profile. After it: `policy.compensator` acts only where a slope's interval excludes 0.

    y = X beta + e,  beta = (X'X)^-1 X'y,  s^2 = |y - X beta|^2 / (n - k),
    interval of w'beta: w'beta +- t_{0.975, n-k} s sqrt(w'(X'X)^-1 w)

Columns that others before them explain (collinear) are left out and have no coefficient: their effect
cannot be told apart. Valid for independent errors of equal variance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

Floats = npt.NDArray[np.float64]

COLLINEAR = 1e-6
"""Part of a column's length that must be left when earlier columns are taken out of it."""


class BadProfile(ValueError):
    """Rows from which nothing can be fitted; names the bound and the value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A fitted line.

    Attributes:
        names: names of the columns kept.
        values: their coefficients, float array [k].
        covariance: s^2 (X'X)^-1, float array [k, k].
        quantile: t_{0.975, n-k}.
        left_out: names of collinear columns.
        residual: s, in units of y.
    """

    names: tuple[str, ...]
    values: Floats
    covariance: Floats
    quantile: float
    left_out: tuple[str, ...]
    residual: float

    def combine(self, weights: dict[str, float]) -> tuple[float, float, float] | None:
        """Value and 95 % interval of a weighted sum of coefficients; None if a column was left out."""
        if any(weight and name not in self.names for name, weight in weights.items()):
            return None
        w = np.array([weights.get(name, 0.0) for name in self.names])
        value = float(w @ self.values)
        half = self.quantile * math.sqrt(max(0.0, float(w @ self.covariance @ w)))
        return value, value - half, value + half


def least_squares(names: Sequence[str], columns: Floats, target: Floats) -> Fit:
    """Fits target = columns @ beta.

    Args:
        names: one per column.
        columns: float array [n, k]; a constant is a column of ones.
        target: float array [n].

    Raises:
        BadProfile: a value is not finite, or there are not more rows than independent columns.
    """
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        row = int(np.flatnonzero(~(np.isfinite(columns).all(axis=1) & np.isfinite(target)))[0])
        raise BadProfile(f"row {row} of the profile holds a value that is not finite")
    kept = _independent(columns)
    rows, free = len(target), len(target) - len(kept)
    if not kept or free < 1:
        raise BadProfile(f"{rows} rows for {len(kept)} independent regressors: at least {len(kept) + 1}")
    lengths = np.linalg.norm(columns[:, kept], axis=0)
    scaled = columns[:, kept] / lengths
    solution, *_ = np.linalg.lstsq(scaled, target, rcond=None)
    variance = float(np.sum((target - scaled @ solution) ** 2)) / free
    covariance = variance * np.linalg.inv(scaled.T @ scaled) / np.outer(lengths, lengths)
    return Fit(
        names=tuple(names[i] for i in kept),
        values=solution / lengths,
        covariance=covariance,
        quantile=float(stdtrit(free, 0.975)),
        left_out=tuple(name for i, name in enumerate(names) if i not in kept),
        residual=math.sqrt(variance),
    )


def _independent(columns: Floats) -> list[int]:
    """Columns that earlier ones do not explain, by Gram and Schmidt."""
    basis: list[Floats] = []
    kept: list[int] = []
    for i in range(columns.shape[1]):
        length = float(np.linalg.norm(columns[:, i]))
        if length == 0:
            continue
        rest = columns[:, i] / length
        for _ in range(2):  # twice is enough against cancellation
            for direction in basis:
                rest = rest - (direction @ rest) * direction
        left = float(np.linalg.norm(rest))
        if left > COLLINEAR:
            basis.append(rest / left)
            kept.append(i)
    return kept

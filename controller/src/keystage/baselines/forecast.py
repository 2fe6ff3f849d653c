"""A forecast of request rates with its uncertainty: an autoregression fitted online.

Before it: rates of adjacent windows. After it: Cocktail sizes its pools. Cocktail (Gunasekaran and others,
NSDI 2022) compares forecasts and takes DeepAR, a recurrent network that gives a distribution, trained
offline on most of a trace. Nobody is given a trace in advance here, so the network is replaced by what
can be learned within a run: an AR(p) model fitted by ridge regression on the windows so far, iterated to
the horizon, with the standard deviation of its own residuals. Pure arithmetic.

    x(t+1) - m = sum_k a_k (x(t-k) - m) + e,   variance of the h-step forecast by the psi weights of AR
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RIDGE_RATIO = 0.1
"""Weight of the penalty in windows' worth of variance: a dozen windows must not fit noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """Rates ahead.

    Attributes:
        mean_rps: expected rate by step ahead.
        deviation_rps: standard deviation by step ahead.
    """

    mean_rps: tuple[float, ...]
    deviation_rps: tuple[float, ...]

    def peak_rps(self, deviations: float) -> float:
        """Largest rate ahead at this many standard deviations above the mean, at least 0."""
        return max(
            0.0,
            *(m + deviations * d for m, d in zip(self.mean_rps, self.deviation_rps, strict=True)),
        )


def forecast(rates_rps: Sequence[float], steps: int, order: int) -> Forecast | None:
    """Forecasts the next windows.

    Args:
        rates_rps: rates of the windows so far, oldest first.
        steps: windows ahead, at least 1.
        order: p, windows that enter a forecast.

    Returns:
        None without any window. With fewer than p + 3 windows: their mean and deviation. Means stay within
        0 and the largest rate seen: an autoregression fitted on a ramp would run away.
    """
    if not rates_rps or steps < 1:
        return None
    x = np.asarray(rates_rps, dtype=np.float64)
    mean, peak = float(x.mean()), float(x.max())
    if len(x) < order + 3:
        return Forecast((mean,) * steps, (float(x.std()),) * steps)
    weights, residual = _fit(x - mean, order)
    past = list(x[-order:] - mean)
    means = []
    for _ in range(steps):
        ahead = float(weights @ np.asarray(past[::-1][:order]))
        ahead = min(max(ahead, -mean), peak - mean)
        past.append(ahead)
        means.append(ahead + mean)
    psi = [1.0]
    for step in range(1, steps):
        psi.append(sum(float(weights[k]) * psi[step - 1 - k] for k in range(min(order, step))))
    spread = residual * np.sqrt(np.minimum(np.cumsum(np.square(psi)), 100.0))
    return Forecast(tuple(means), tuple(float(s) for s in spread))


def _fit(x: npt.NDArray[np.float64], order: int) -> tuple[npt.NDArray[np.float64], float]:
    """AR weights (most recent first) of a series with mean 0, and the deviation of the residuals."""
    rows = np.lib.stride_tricks.sliding_window_view(x, order + 1)
    past, following = rows[:, -2::-1], rows[:, -1]
    penalty = RIDGE_RATIO * (float(np.mean(x**2)) or 1.0) * max(1.0, len(rows) / 10)
    gram = past.T @ past + penalty * np.eye(order)
    weights: npt.NDArray[np.float64] = np.linalg.solve(gram, past.T @ following).astype(np.float64)
    residuals = following - past @ weights
    return weights, float(np.sqrt(np.mean(residuals**2)))

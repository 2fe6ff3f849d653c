"""Rates for Symphony 5.7, a day in minutes: synthesised, since the paper's 150 hours of video are not public.

Before it: nothing. After it: `symphony_changing`. Model m asks for

    base_m * (1 + 0.6 sin(2 pi (t / period_m + phase_m))) * exp(noise_m(t)) * surge(t)

requests a second, constant within each second: periods of a third to all of the run, noise an autoregressive
process (0.15 in log, correlation 0.9 from second to second: cameras see more and less), and one surge common
to all, which lifts the sum above what the cluster can do for a tenth of the run. Bases are drawn lognormal (a
few models have most of the load) and scaled so that the mean load is `MEAN_LOAD` of the capacity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keystage.bench.batching_arrivals import Arrivals

MEAN_LOAD = 0.55
SURGE = (0.6, 0.7, 1.35)
"""From and to, in parts of the run, and the sum over the capacity that it lifts the load to."""


def rates(
    models: int, seconds: int, capacity_rps: float, weights: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Requests a second of each model in each second, float64[seconds, models].

    Args:
        models: how many.
        seconds: length.
        capacity_rps: of the cluster for the mix of `weights`.
        weights: mean shares, of sum 1.
        seed: of phases, periods and noise.
    """
    random = np.random.default_rng([seed, 57])
    at_s = np.arange(seconds)[:, None]
    periods = random.uniform(seconds / 3, seconds, models)
    waves = 1 + 0.6 * np.sin(2 * np.pi * (at_s / periods + random.random(models)))
    noise = np.zeros((seconds, models))
    steps = random.normal(0.0, 0.15 * np.sqrt(1 - 0.9**2), (seconds, models))
    for second in range(1, seconds):
        noise[second] = 0.9 * noise[second - 1] + steps[second]
    found: NDArray[np.float64] = waves * np.exp(noise) * weights
    found *= MEAN_LOAD * capacity_rps / found.sum(axis=1).mean()
    begin, end, load = SURGE
    surging = slice(int(begin * seconds), int(end * seconds))
    found[surging] *= load * capacity_rps / found[surging].sum(axis=1, keepdims=True)
    return found


def weights(models: int, seed: int) -> NDArray[np.float64]:
    """Mean shares of the models, of sum 1."""
    drawn = np.random.default_rng([seed, 75]).lognormal(0.0, 0.8, models)
    return np.asarray(drawn / drawn.sum(), dtype=np.float64)


def drawn_arrivals(rates_rps: NDArray[np.float64], seed: int) -> Arrivals:
    """Poisson arrivals at these rates.

    Args:
        rates_rps: float64[seconds, models].
        seed: of the arrivals.
    """
    random = np.random.default_rng([seed, 7])
    seconds, models = rates_rps.shape
    counts = random.poisson(rates_rps)
    second = np.repeat(np.arange(seconds), counts.sum(axis=1))
    model = np.repeat(np.tile(np.arange(models, dtype=np.int32), seconds), counts.ravel())
    times_s = second + random.random(len(second))
    order = np.argsort(times_s, kind="stable")
    return Arrivals(times_s[order], model[order])

"""Arrivals of the batching benchmarks: renewal streams, one a model, merged into one.

Before: rates and shapes of a benchmark's cell. After: `batching_cluster.serve`. Gaps are drawn at a mean of
one and then scaled by the rate, so that one seed at two rates gives the same pattern, faster or slower: a
search over rates compares like with like, and so do two schedulers at one seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Gaps: TypeAlias = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Draws so many times between arrivals, of mean 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """Who comes when.

    Attributes:
        times_s: float64[n], ascending.
        model: int32[n], the index of the model of each.
    """

    times_s: NDArray[np.float64]
    model: NDArray[np.int32]


def poisson(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Exponential gaps: a Poisson stream."""
    return random.standard_exponential(count)


def gamma(shape: float) -> Gaps:
    """Gamma gaps of this shape: squared coefficient of variation 1 / shape; 1 is Poisson, 0.1 bursty.

    Raises:
        ValueError: the shape is not above 0.
    """
    if not shape > 0:
        raise ValueError(f"a gamma shape must be above 0, it is {shape}")
    if shape == 1:
        return poisson
    return lambda random, count: random.standard_gamma(shape, count) / shape


def uniform(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Even gaps, each stream at a phase of its own."""
    gaps = np.ones(count)
    gaps[:1] = random.random()
    return gaps


def shares(models: int, zipf: float = 0.0) -> NDArray[np.float64]:
    """Each model's share of the requests, float64[models] of sum 1; the first is the most popular.

    Args:
        models: how many.
        zipf: share k is as k^-zipf; 0 makes all equal, Symphony's skewed setting is 0.9.
    """
    weights: NDArray[np.float64] = np.arange(1, models + 1, dtype=np.float64) ** -zipf
    return weights / float(weights.sum())


def arrivals(rates_rps: Sequence[float], seconds: float, seed: int, gaps: Gaps = poisson) -> Arrivals:
    """Merged streams of all models.

    Args:
        rates_rps: of each model; 0 is allowed.
        seconds: the streams run over [0, seconds).
        seed: same seed, same gaps at a mean of 1, whatever the rates.
        gaps: their law.
    """
    streams = [_stream(rate, seconds, [seed, model], gaps) for model, rate in enumerate(rates_rps)]
    times_s = np.concatenate(streams) if streams else np.empty(0)
    model = np.repeat(np.arange(len(streams), dtype=np.int32), [len(stream) for stream in streams])
    order = np.argsort(times_s, kind="stable")
    return Arrivals(times_s[order], model[order])


_BLOCK = 4096


def _stream(rate_rps: float, seconds: float, seed: list[int], gaps: Gaps) -> NDArray[np.float64]:
    """Arrival times of one model in [0, seconds)."""
    if rate_rps < 0 or not math.isfinite(rate_rps):
        raise ValueError(f"a rate must be at least 0 and finite, it is {rate_rps}")
    if rate_rps == 0:
        return np.empty(0)
    random = np.random.default_rng(seed)
    until = seconds * rate_rps
    # Blocks of fixed size, so that a longer stream begins like a shorter one; a law may treat the first
    # gap of a stream apart (`uniform`), hence one draw for all of the first block and a cut of one after.
    found = np.cumsum(gaps(random, _BLOCK))
    parts = [found]
    while found[-1] < until:
        steps = gaps(random, _BLOCK + 1)[1:]
        found = found[-1] + np.cumsum(steps)
        parts.append(found)
    times = np.concatenate(parts)
    return times[: int(np.searchsorted(times, until, side="left"))] / rate_rps

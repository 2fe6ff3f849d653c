"""Every random number of a run, drawn ahead: one stream per purpose, pipeline and stage.

Before it: the world and a seed. After it: arrays that the stages read by item or by start, so no
decision moves another draw and two steerings under one seed meet the same arrivals and the same
service times (common random numbers). Nothing else in the simulator draws.
"""

from __future__ import annotations

import array
import math

import numpy as np

from keystage.simulator.api import ArrivalSpec, Floats

ARRIVALS, SERVICES, STARTS, STEPS = range(4)
"""Purposes of streams."""

_MEAN_ONE_MARGIN = 1.2
"""Gaps drawn at a time beyond those expected to be needed."""


def stream(seed: int, purpose: int, pipeline: int, stage: int = 0) -> np.random.Generator:
    """The generator of one purpose at one place, independent of all others."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, purpose, pipeline, stage])))


def arrivals_s(spec: ArrivalSpec, duration_s: float, seed: int, pipeline: int) -> Floats:
    """Arrival times in seconds, ascending, shape [n].

    Gaps are gamma with mean 1/rate and CV `cv` (shape 1/cv^2); the first arrival comes one gap after 0.
    """
    if spec.times_s is not None:
        return np.asarray(spec.times_s, dtype=np.float64)
    if spec.rate_rps <= 0:
        return np.empty(0)
    random = stream(seed, ARRIVALS, pipeline)
    if spec.count:
        return np.cumsum(_gaps_s(random, spec, spec.count))
    expected = spec.rate_rps * duration_s
    step = int(_MEAN_ONE_MARGIN * expected + 4 * spec.cv * math.sqrt(expected)) + 16
    times = np.cumsum(_gaps_s(random, spec, step))
    while times[-1] < duration_s:
        times = np.concatenate((times, times[-1] + np.cumsum(_gaps_s(random, spec, step))))
    return times[: int(np.searchsorted(times, duration_s, side="right"))]


def _gaps_s(random: np.random.Generator, spec: ArrivalSpec, count: int) -> Floats:
    if spec.cv <= 0:
        return np.full(count, 1 / spec.rate_rps)
    scv = spec.cv * spec.cv
    if scv == 1:
        return random.exponential(1 / spec.rate_rps, count)
    return random.gamma(1 / scv, scv / spec.rate_rps, count)


def factors(scv: float, count: int, seed: int, pipeline: int, stage: int) -> array.array[float] | None:
    """Factors of mean 1 and squared CV `scv` on the service time, by item; None where it is constant."""
    if scv <= 0:
        return None
    random = stream(seed, SERVICES, pipeline, stage)
    drawn = random.exponential(1.0, count) if scv == 1 else random.gamma(1 / scv, scv, count)
    return array.array("d", drawn.tobytes())


def steps(mean: float, count: int, seed: int, pipeline: int) -> list[int]:
    """Waves of each session: geometric with the given mean, at least 1."""
    if mean <= 1:
        return [1] * count
    return [int(n) for n in stream(seed, STEPS, pipeline).geometric(1 / mean, count)]

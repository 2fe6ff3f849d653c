"""When requests are sent: arrival times as pure functions of rate, CV and seed.

Comes after `trace` and before `sender`, which follows the times whatever the answers do.
It must not read a clock, the environment or a file.

Gamma inter-arrivals: shape k = 1 / cv^2, so cv = 1 / sqrt(k); cv 1 is a Poisson process, cv 0 is
constant spacing. A run of N = round(rate * duration) arrivals has its N gaps rescaled so that they
sum to the duration exactly; scaling changes neither the CV of the gaps nor their order.
Rescaled gamma gaps are Dirichlet(k, ..., k), hence for the population CV of N gaps, exactly,
E[cv^2] = (N - 1) / (N k + 1): a short sample reads low (N = 100 at CV 4: 3.7).

Random numbers come from MT19937 through `RandomState`, whose streams NumPy froze (NEP 19): a seed
means the same run with every version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONSTANT_BELOW_CV = 1e-6
"""A smaller CV is constant spacing: its gamma shape would leave the range of floats."""

_ARRIVAL_STREAM = 1
_INTERVAL_SEED = 20231116
_INTERVAL_WORK = 2_000_000


class ArrivalError(ValueError):
    """A rate, CV or duration that gives no schedule."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spacing:
    """Rate and variation of a list of times.

    Attributes:
        count: number of arrivals.
        rate_rps: arrivals per second over the window.
        cv: coefficient of variation of the count - 1 gaps, None below two gaps.
    """

    count: int
    rate_rps: float
    cv: float | None


def stream(seed: int, purpose: int) -> np.random.RandomState:
    """A random stream of its own for each purpose, so that drawing more of one changes no other."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, purpose]
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(words)))


def gaps(count: int, cv: float, seed: int) -> Floats:
    """Inter-arrival times of mean 1 (in expectation).

    Args:
        count: number of gaps.
        cv: coefficient of variation, 0 for constant spacing, 1 for Poisson.
        seed: seed.

    Raises:
        ArrivalError: for a negative or non-finite cv.
    """
    if not (math.isfinite(cv) and cv >= 0):
        raise ArrivalError(f"cv must be finite and at least 0, got {cv}")
    if cv < CONSTANT_BELOW_CV:
        return np.ones(count)
    shape = 1.0 / (cv * cv)
    return np.asarray(stream(seed, _ARRIVAL_STREAM).gamma(shape, 1.0 / shape, count), dtype=np.float64)


def synthetic(rate_rps: float, cv: float, duration_s: float, seed: int) -> Floats:
    """Arrival times in seconds; the last is at `duration_s` exactly.

    Raises:
        ArrivalError: for a rate or duration that is not positive, or below one arrival in all.
    """
    _check_positive("rate", rate_rps)
    _check_positive("duration", duration_s)
    count = round(rate_rps * duration_s)
    if count < 1:
        raise ArrivalError(f"rate {rate_rps:g}/s over {duration_s:g} s gives no arrival; raise one of them")
    drawn = gaps(count, cv, seed)
    total = float(drawn.sum())
    if total <= 0:
        raise ArrivalError(
            f"all {count} gaps are 0 at cv {cv:g}, seed {seed}; take a longer run or a lower cv"
        )
    times = np.cumsum(drawn) * (duration_s / total)
    times[-1] = duration_s
    return np.minimum(times, duration_s)


def at_speed(offsets_s: Sequence[float], speed: float, duration_s: float | None = None) -> Floats:
    """A trace's arrivals, `speed` times as fast, cut at `duration_s` where one is given.

    Raises:
        ArrivalError: if speed or duration is not positive.
    """
    _check_positive("speed", speed)
    times = _from_zero(offsets_s) / speed
    if duration_s is None:
        return times
    _check_positive("duration", duration_s)
    return times[times <= duration_s]


def at_rate(offsets_s: Sequence[float], rate_rps: float, duration_s: float | None = None) -> Floats:
    """A trace's first round(rate * duration) arrivals, rescaled to that rate; the shape is kept.

    All arrivals are taken when no duration is given or the trace is shorter: the run then lasts
    count / rate.

    Raises:
        ArrivalError: if the rate is not positive, or the arrivals wanted all have one timestamp.
    """
    _check_positive("rate", rate_rps)
    times = _from_zero(offsets_s)
    if duration_s is not None:
        _check_positive("duration", duration_s)
        times = times[: max(round(rate_rps * duration_s), 1)]
    if len(times) == 1:
        return times
    if times[-1] <= 0:
        raise ArrivalError(
            f"the first {len(times)} arrivals of the trace share one timestamp: no shape to keep"
        )
    return np.asarray(times * (len(times) / rate_rps / times[-1]))


def spacing(times_s: Floats, window_s: float) -> Spacing:
    """Achieved rate and CV. Feed it the times at which requests were really sent.

    Args:
        times_s: times, shape (count,), in any order.
        window_s: length of the run; the last arrival, if that is later.
    """
    ordered = np.sort(times_s)
    count = len(ordered)
    if count == 0:
        return Spacing(0, 0.0, None)
    window_s = max(window_s, float(ordered[-1]))
    between = np.diff(ordered)
    mean = float(between.mean()) if len(between) else 0.0
    cv = float(between.std()) / mean if len(between) > 1 and mean > 0 else None
    return Spacing(count, count / window_s if window_s > 0 else math.inf, cv)


def scv_moments(cv: float, count: int) -> tuple[float, float]:
    """Mean and standard deviation of the squared CV read from `count` gamma gaps, exactly.

    Dirichlet moments, A = count * k: E[x^2] = k(k+1)/(A(A+1)); E[x^4] and E[x^2 y^2] likewise over
    A(A+1)(A+2)(A+3); scv = count * sum(x^2) - 1.
    """
    if cv < CONSTANT_BELOW_CV:
        return 0.0, 0.0
    k = 1.0 / (cv * cv)
    a = count * k
    mean_sum = (k + 1) / (a + 1)
    rising = a * (a + 1) * (a + 2) * (a + 3)
    fourth = k * (k + 1) * (k + 2) * (k + 3) / rising
    cross = (k * (k + 1)) ** 2 / rising
    variance = count * fourth + count * (count - 1) * cross - mean_sum**2
    return count * mean_sum - 1, count * math.sqrt(max(variance, 0.0))


def cv_interval(cv: float, count: int) -> tuple[float, float]:
    """Where 95 % of samples of `count` gamma gaps of true CV `cv` lie (fixed-seed Monte Carlo)."""
    if cv < CONSTANT_BELOW_CV or count < 2:
        return 0.0, 0.0
    draws = int(min(max(_INTERVAL_WORK // count, 200), 2000))
    shape = 1.0 / (cv * cv)
    source = np.random.RandomState(_INTERVAL_SEED)
    read = []
    for _ in range(draws):
        sample = source.gamma(shape, 1.0, count)
        mean = sample.mean()
        read.append(float(sample.std() / mean) if mean > 0 else 0.0)
    low, high = np.quantile(read, (0.025, 0.975))
    return float(low), float(high)


def _from_zero(offsets_s: Sequence[float]) -> Floats:
    times = np.asarray(offsets_s, dtype=np.float64)
    if len(times) == 0:
        raise ArrivalError("the trace holds no arrival")
    offsets: Floats = times - times[0]
    return offsets


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ArrivalError(f"{name} must be finite and above 0, got {value}")

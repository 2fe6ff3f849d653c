"""When requests are sent: arrival times as pure functions of rate, CV and seed.

Comes after `traces` and before the sender, which follows the times whatever the answers do;
`arrivals_process` builds on it what `--arrivals` can say. It must not read a clock, the environment
or a file.

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
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONSTANT_BELOW_CV = 1e-6
"""A smaller CV is constant spacing: its gamma shape would leave the range of floats."""

MAX_ARRIVALS = 20_000_000
"""Of one schedule. A time takes 8 bytes; what the whole plan takes is said in `plan`."""

CLAIM_FACTOR = 2000
"""A CV is claimed over CLAIM_FACTOR * CV^2 arrivals and more: the standard error of the CV read from
n gamma gaps is CV * sqrt((1 + CV^2) / 2n), here 1.6 % of a large CV and 2.2 % of CV 1."""

CLAIM_LEAST = 200
"""The least number a claim takes: below CV 0.3 the factor alone would let few arrivals do (5 % here)."""

MAX_CV = 100.0
"""A claim of it takes MAX_ARRIVALS."""

ARRIVAL_STREAM = 1
_INTERVAL_SEED = 20231116
_INTERVAL_WORK = 2_000_000
_MONTE_CARLO_MOST = 50_000


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

    def arrivals_needed(self, asked_cv: float | None = None) -> int | None:
        """How many arrivals a claim of this CV takes; None where no CV was read and none asked."""
        cv = self.cv if asked_cv is None else asked_cv
        return None if cv is None else arrivals_for_cv(cv)

    def is_claimed(self, asked_cv: float | None = None) -> bool:
        """Whether the run is long enough for a report to claim its CV.

        Args:
            asked_cv: of the process, where it has one; else the CV that was read stands for it.
        """
        needed = self.arrivals_needed(asked_cv)
        return self.cv is not None and needed is not None and self.count >= needed


def arrivals_for_cv(cv: float) -> int:
    """Arrivals over which a CV can be claimed: 2,000 CV^2, at least 200; three where spacing is constant."""
    if cv < CONSTANT_BELOW_CV:
        return 3
    return max(math.ceil(CLAIM_FACTOR * cv * cv), CLAIM_LEAST)


def stream(seed: int, purpose: int) -> np.random.RandomState:
    """A random stream of its own for each purpose, so that drawing more of one changes no other."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, purpose]
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(words)))


def gaps(count: int, cv: float, seed: int, purpose: int = ARRIVAL_STREAM) -> Floats:
    """Inter-arrival times of mean 1 (in expectation).

    Args:
        count: number of gaps.
        cv: coefficient of variation, 0 for constant spacing, 1 for Poisson.
        seed: seed.
        purpose: which of the seed's streams they are drawn from.

    Raises:
        ArrivalError: for a cv outside 0..MAX_CV.
    """
    if not 0 <= cv <= MAX_CV:
        raise ArrivalError(f"cv must be in 0..{MAX_CV:g}, got {cv:g}")
    if cv < CONSTANT_BELOW_CV:
        return np.ones(count)
    shape = 1.0 / (cv * cv)
    return np.asarray(stream(seed, purpose).gamma(shape, 1.0 / shape, count), dtype=np.float64)


def synthetic(rate_rps: float, cv: float, duration_s: float, seed: int) -> Floats:
    """Arrival times in seconds; the last is at `duration_s` exactly.

    Raises:
        ArrivalError: for a rate or duration that is not positive, below one arrival in all, or above
            MAX_ARRIVALS.
    """
    check_positive("rate", rate_rps)
    check_positive("duration", duration_s)
    count = whole_count(rate_rps * duration_s)
    if count < 1:
        raise ArrivalError(f"rate {rate_rps:g}/s over {duration_s:g} s gives no arrival; raise one of them")
    drawn = gaps(count, cv, seed)
    total = float(drawn.sum())
    if total <= 0 or math.isinf(duration_s / total):
        raise ArrivalError(
            f"all {count} gaps are 0 at cv {cv:g}, seed {seed}; take a longer run or a lower cv"
        )
    times = np.cumsum(drawn) * (duration_s / total)
    times[-1] = duration_s
    return np.minimum(times, duration_s)


def at_rate(offsets_s: Sequence[float] | Floats, rate_rps: float, duration_s: float | None = None) -> Floats:
    """A trace's first round(rate * duration) arrivals, rescaled to that rate; the shape is kept.

    All arrivals are taken when no duration is given or the trace is shorter: the run then lasts
    count / rate.

    Raises:
        ArrivalError: if the rate is not positive, or the arrivals wanted all have one timestamp.
    """
    check_positive("rate", rate_rps)
    times = _from_zero(offsets_s)
    if duration_s is not None:
        check_positive("duration", duration_s)
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


def _scv_interval(cv: float, count: int, z: float) -> tuple[float, float]:
    """The squared CV at -z and +z standard deviations, its skew taken out by a power.

    For a variable of mean m and cumulants k2, k3, the power p = 1 - m k3 / (3 k2^2) has no skew to first
    order (1/3 for a chi-square: Wilson and Hilferty, 1931). Here k3 is exact, from Dirichlet moments.
    """
    k, n = 1.0 / (cv * cv), float(count)
    a = n * k

    def moment(*powers: int) -> float:
        """E[x^i y^j ...] of different coordinates."""
        value, total = 1.0, 0
        for power in powers:
            for step in range(power):
                value *= (k + step) / (a + total)
                total += 1
        return value

    first = n * moment(2)
    second = n * moment(4) + n * (n - 1) * moment(2, 2)
    third = n * moment(6) + 3 * n * (n - 1) * moment(4, 2) + n * (n - 1) * (n - 2) * moment(2, 2, 2)
    k2 = n**2 * (second - first**2)
    k3 = n**3 * (third - 3 * second * first + 2 * first**3)
    mean = n * first - 1
    p = 1 - mean * k3 / (3 * k2 * k2)
    spread = math.sqrt(k2) / mean
    if abs(p) < 0.01:
        centre = math.log(mean) - spread**2 / 2
        return math.exp(centre - z * spread), math.exp(centre + z * spread)
    centre = 1 + p * (p - 1) / 2 * spread**2
    ends = [mean * (centre + sign * p * z * spread) ** (1 / p) for sign in (-1, 1)]
    return min(ends), max(ends)


def cv_interval(cv: float, count: int, coverage: float = 0.95) -> tuple[float, float]:
    """Where a share `coverage` of samples of `count` gamma gaps of true CV `cv` lie.

    By fixed-seed Monte Carlo where samples are small; from the exact moments of the squared CV where
    they are long enough for a claim, or too long to be drawn.
    """
    if cv < CONSTANT_BELOW_CV or count < 2:
        return 0.0, 0.0
    tail = (1 - coverage) / 2
    if count >= min(arrivals_for_cv(cv) - 1, _MONTE_CARLO_MOST):
        low, high = _scv_interval(cv, count, statistics.NormalDist().inv_cdf(1 - tail))
        return math.sqrt(low), math.sqrt(high)
    draws = int(min(max(_INTERVAL_WORK // count, 200), 2000))
    shape = 1.0 / (cv * cv)
    source = np.random.RandomState(_INTERVAL_SEED)
    read = []
    for _ in range(draws):
        sample = source.gamma(shape, 1.0, count)
        mean = sample.mean()
        read.append(float(sample.std() / mean) if mean > 0 else 0.0)
    low, high = np.quantile(read, (tail, 1 - tail))
    return float(low), float(high)


def whole_count(expected: float) -> int:
    """How many arrivals a run sends, from the integral of its rate.

    Raises:
        ArrivalError: more than MAX_ARRIVALS, or no number.
    """
    if not expected < MAX_ARRIVALS + 0.5:
        raise ArrivalError(f"gives {expected:.10g} arrivals, at most {MAX_ARRIVALS}")
    return round(expected)


def check_positive(name: str, value: float) -> None:
    """Refuses what is not finite and above 0, by name.

    Raises:
        ArrivalError: with the name, the bound and the value.
    """
    if not (math.isfinite(value) and value > 0):
        raise ArrivalError(f"{name} must be finite and above 0, got {value:g}")


def _from_zero(offsets_s: Sequence[float] | Floats) -> Floats:
    times = np.asarray(offsets_s, dtype=np.float64)
    if len(times) == 0:
        raise ArrivalError("the trace holds no arrival")
    offsets: Floats = times - times[0]
    return offsets

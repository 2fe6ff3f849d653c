"""Exact intervals of shares, and the quantiles they need. Pure; `compare` uses it.

Kept free of SciPy, which the load generator's image does not carry.

I_x(a, b), the regularised incomplete beta function, is Lentz's continued fraction (Numerical Recipes,
3rd edition, 6.4; DLMF 8.17.22), good to 1e-8 relative for a + b up to 10^6: a run has no more requests.
Clopper and Pearson (1934): a share k of n has the interval [Beta(alpha/2; k, n - k + 1),
Beta(1 - alpha/2; k + 1, n - k)], which holds the true share with at least 1 - alpha, whatever it is,
where requests fail independently of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

_TINY = 1e-300
_STEPS = 20_000


def beta_cdf(x: float, a: float, b: float) -> float:
    """I_x(a, b) for a, b > 0 and x in 0..1."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away(1.0 + factor * d)
            c = _away(1.0 + factor / c)
            value *= d * c
        if abs(d * c - 1.0) < 1e-14:
            break
    return value


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Value x with I_x(a, b) = probability."""
    return _root(lambda x: beta_cdf(x, a, b) - probability, 0.0, 1.0)


def clopper_pearson(successes: int, count: int, alpha: float) -> tuple[float, float]:
    """Interval of a share that holds the true one with at least 1 - alpha.

    Args:
        successes: k.
        count: n, at least 1.
        alpha: error probability, in 0..1.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= count or count < 1:
        raise ValueError(f"a share needs 0 <= k <= n and n >= 1, got {successes} of {count}")
    failures = count - successes
    low = 0.0 if successes == 0 else beta_quantile(alpha / 2, successes, failures + 1)
    high = 1.0 if failures == 0 else beta_quantile(1 - alpha / 2, successes + 1, failures)
    return low, high


def share_difference(a: tuple[int, int], b: tuple[int, int], alpha: float) -> tuple[float, float]:
    """Interval of share b - share a that holds the true difference with at least 1 - alpha.

    Both shares get a Clopper-Pearson interval of confidence sqrt(1 - alpha). The runs are independent,
    so both hold with at least 1 - alpha, and then so does the difference of their ends: exact in the
    sense of never too narrow, at the price of being wider than an approximate one.

    Args:
        a: (k, n) of the one run.
        b: of the other.
        alpha: error probability.
    """
    each = 1 - math.sqrt(1 - alpha)
    (low_a, high_a), (low_b, high_b) = clopper_pearson(*a, each), clopper_pearson(*b, each)
    return low_b - high_a, high_b - low_a


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, for a probability of at least 0.5."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"needs 0.5 <= p < 1 and a degree of freedom, got {probability} and {degrees}")

    def upper(t: float) -> float:
        return 0.5 * beta_cdf(degrees / (degrees + t * t), degrees / 2, 0.5)

    high = 1.0
    while upper(high) > 1 - probability:
        high *= 2
    return _root(lambda t: (1 - probability) - upper(t), 0.0, high)


def expanded_tail(alpha: float, blocks: int) -> float:
    """Which tail of a bootstrap's replicates bounds an interval of error alpha, below alpha / 2.

    A percentile interval over n resampled blocks is too narrow for small n, as a normal interval with
    the variance over n is beside Student's. Hesterberg's expanded percentile interval (The American
    Statistician 69(4), 2015, section 5.3): tail = Phi(-sqrt(n / (n - 1)) t(1 - alpha / 2; n - 1)).
    """
    t = student_quantile(1 - alpha / 2, blocks - 1)
    return NormalDist().cdf(-math.sqrt(blocks / (blocks - 1)) * t)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where an ascending function passes 0, by halving: 60 halvings leave 1e-18 of the width."""
    for _ in range(60):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2

"""Percentiles of waits in queues with many servers.

Before it: rates, variations and a target such as "99 % wait at most 0.2 s". After it: a time, or the
smallest number of servers. Pure arithmetic on `maths.erlang`; it must not know stages or replicas.
The policy sizes by mean waits; this is for those who ask what a mean means for the slowest (docs/control.md).

    M/M/c:  P(W > t) = C(c, a) exp(-(c mu - lambda) t)                       exact, a < c, FIFO
    G/G/c:  P(W > t) ~ C(c, a) exp(-(c mu - lambda) t / f),  f = (ca2 + cs2) / 2
    inverse: t_p = max(0, f / (c mu - lambda) ln(C / (1 - p)))

Symbols as in `maths.erlang`; p is the part of arrivals that wait at most t_p.
Source: the tail of M/M/c is in every text (Kleinrock 1975, section 3.5). For G/G/c we keep the M/M/c
probability of waiting at all and make the wait of those who wait exponential with the mean that
Allen and Cunneen give (Kingman's heavy-traffic limit is exponential), so that the mean of this
distribution is exactly `ggc_wait_s`. Range of validity: exact at ca2 = cs2 = 1 and, in the limit,
for rho -> 1; for bursty arrivals at low utilisation P(W > 0) is higher than C and the tail is a
lower guess.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from keystage.controller.maths import erlang, queueing


def wait_tail(
    arrival_rps: float, service_s: float, servers: int, ca2: float, cs2: float, wait_s: float
) -> float:
    """P(W > wait_s): the part of arrivals that waits longer; 1 when the servers cannot keep up.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not wait_s >= 0:
        raise ValueError(f"wait must be >= 0 s, got {wait_s}")
    mean_s = erlang.ggc_wait_s(arrival_rps, service_s, servers, ca2, cs2)
    probability = erlang.erlang_c(servers, arrival_rps * service_s)
    return _tail(probability, mean_s, wait_s)


def wait_percentile_s(
    arrival_rps: float, service_s: float, servers: int, ca2: float, cs2: float, probability: float
) -> float:
    """The wait in seconds that a part `probability` (0 <= p < 1) of arrivals does not exceed.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be in [0, 1), got {probability}")
    mean_s = erlang.ggc_wait_s(arrival_rps, service_s, servers, ca2, cs2)
    waiting = erlang.erlang_c(servers, arrival_rps * service_s)
    if mean_s == math.inf:
        return math.inf
    if waiting <= 1 - probability:
        return 0.0
    return mean_s / waiting * math.log(waiting / (1 - probability))


def wait_percentile_many(
    arrival_rps: npt.ArrayLike,
    service_s: npt.ArrayLike,
    servers: npt.ArrayLike,
    ca2: npt.ArrayLike,
    cs2: npt.ArrayLike,
    probability: float,
) -> queueing.Floats:
    """`wait_percentile_s` per entry [n]; NaN where an argument is out of its range.

    Raises:
        ValueError: the probability is out of its range.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be in [0, 1), got {probability}")
    load = np.asarray(arrival_rps, dtype=np.float64) * np.asarray(service_s, dtype=np.float64)
    mean_s = queueing.ggc_wait_many(arrival_rps, service_s, servers, ca2, cs2)
    waiting = queueing.erlang_c_many(servers, load)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait_s = mean_s / waiting * np.log(waiting / (1 - probability))
    settled = np.isnan(mean_s) | np.isinf(mean_s)
    return np.where(settled, mean_s, np.where(waiting <= 1 - probability, 0.0, wait_s))


def servers_for_percentile(
    arrival_rps: float,
    service_s: float,
    ca2: float,
    cs2: float,
    wait_s: float,
    probability: float,
    most: int,
) -> int:
    """The smallest c in 1..most with P(W > wait_s) <= 1 - probability; `most` if none is.

    The tail falls with c (both its factors do), so the search doubles and then halves.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be in [0, 1), got {probability}")
    if most < 1:
        raise ValueError(f"most servers must be >= 1, got {most}")

    def is_enough(servers: int) -> bool:
        return wait_tail(arrival_rps, service_s, servers, ca2, cs2, wait_s) <= 1 - probability

    low, high = 0, 1  # `low` is not enough, `high` is, or is the bound
    while high < most and not is_enough(high):
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _tail(waiting: float, mean_s: float, wait_s: float) -> float:
    """P(W > t) of a wait that is 0 with 1 - `waiting`, else exponential, with mean `mean_s` in all."""
    if mean_s == math.inf:
        return 1.0
    if wait_s == 0:
        return waiting
    if mean_s == 0:  # nobody waits, or clockwork
        return 0.0
    return waiting * math.exp(-waiting * wait_s / mean_s)

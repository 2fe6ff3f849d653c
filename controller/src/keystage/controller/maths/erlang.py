"""Waiting times of queues with many servers: Erlang B and C, M/M/c, G/G/c.

Before it: the estimator gives rates and variations. After it: the corrector asks for the smallest
number of servers that meets a target. Pure arithmetic; it must not know stages or replicas.

Symbols: lambda arrival rate (1/s), mu service rate of one server (1/s), c servers,
a = lambda/mu offered load (erlang), rho = a/c utilisation, ca2 and cs2 squared coefficients of
variation of inter-arrival and service times.

    B(0) = 1,  B(c) = a B(c-1) / (c + a B(c-1))           Erlang loss (Erlang 1917), stable for any c
    C(c) = c B(c) / (c - a + a B(c))                      probability of waiting, a < c
    W_M/M/c = C(c) / (c mu - lambda)                      mean wait
    W_G/G/c ~ W_M/M/c (ca2 + cs2) / 2                     Allen and Cunneen (1978), a < c

The recursion takes c steps. From `MANY_SERVERS` on B is had without it in about 9 sqrt(c) terms:

    1/B(c) = sum_j c!/((c-j)! a^j)                                   a >= c: terms fall from 1
           = e^a c!/a^c - sum_j c! a^j/(c+j)!,  j >= 1               a < c: tail of the Poisson sum
    e^a c!/a^c = sqrt(2 pi c) exp(c (x - log1p(x)) + 1/(12c) - ...),  x = a/c - 1   (Stirling)

Range of validity: B and C are exact (relative error below 1e-9 up to c = 100,000, tested against other
computations). Allen and Cunneen is exact for M/M/c and M/G/1, good in heavy traffic, and an upper guess
for arrivals more regular than Poisson at low utilisation; for bursty arrivals and many servers at low
utilisation it errs to either side.

Deviation: Eq. 1 of QUART (section 5.1), meant as the M/M/c delay, gives
P0 lambda / (mu (mu - lambda)) + 1/mu at c = 1 and stays finite as rho -> 1; the exact formula is
used instead. A sojourn is wait + service; the paper calls it queuing delay.
"""

from __future__ import annotations

import math

import numpy as np

MANY_SERVERS = 1000
"""From here on B is summed from its largest terms instead of by recursion."""


def erlang_b(servers: int, load: float) -> float:
    """Blocking probability of M/M/c/c.

    Args:
        servers: c >= 0.
        load: a = lambda/mu in erlang, finite and >= 0.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(servers, load)
    if servers >= MANY_SERVERS and load > 0:
        return _summed_b(servers, load)
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = next_b(blocking, k, load)
    return blocking


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c; 1 when load >= servers.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(servers, load)
    if load >= servers:
        return 1.0
    return c_from_b(erlang_b(servers, load), servers, load)


def mmc_wait_s(arrival_rps: float, service_s: float, servers: int) -> float:
    """Mean wait in M/M/c in seconds; infinite when the servers cannot keep up.

    Raises:
        ValueError: an argument is out of its range.
    """
    load = arrival_rps * service_s
    _check(servers, load)
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load)


def ggc_wait_s(arrival_rps: float, service_s: float, servers: int, ca2: float, cs2: float) -> float:
    """Mean wait in G/G/c in seconds by Allen and Cunneen; infinite when rho >= 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not (ca2 >= 0 and cs2 >= 0):
        raise ValueError(f"squared coefficients of variation must be >= 0, got {ca2} and {cs2}")
    wait_s = mmc_wait_s(arrival_rps, service_s, servers)
    if wait_s == math.inf:
        return wait_s  # not even regular arrivals and services (both scv 0) fit
    return wait_s * (ca2 + cs2) / 2


def servers_for_wait(
    arrival_rps: float, service_s: float, ca2: float, cs2: float, wait_s: float, most: int
) -> int:
    """The smallest c in 1..most with a mean G/G/c wait of at most `wait_s`; `most` if none is.

    One pass of the Erlang recursion, from the load on where that is large.

    Raises:
        ValueError: an argument is out of its range.
    """
    load = arrival_rps * service_s
    _check(most, load)
    if not wait_s >= 0:
        raise ValueError(f"target wait must be >= 0 s, got {wait_s}")
    if load >= most:
        return most
    factor = (ca2 + cs2) / 2
    first = math.floor(load) + 1  # the fewest that keep up
    if first >= MANY_SERVERS:
        blocking = erlang_b(first - 1, load)
    else:
        first, blocking = 1, 1.0
    for k in range(first, most):
        blocking = next_b(blocking, k, load)
        if load < k and c_from_b(blocking, k, load) * service_s / (k - load) * factor <= wait_s:
            return k
    return most


def next_b(blocking: float, servers: int, load: float) -> float:
    """B(c) from B(c-1): one step of the recursion, `servers` = c."""
    return load * blocking / (servers + load * blocking)


def c_from_b(blocking: float, servers: int, load: float) -> float:
    """C(c) from B(c), for load < servers; no term cancels."""
    return servers * blocking / (servers - load + load * blocking)


def _summed_b(servers: int, load: float) -> float:
    """B without the recursion, for many servers (see the module); load > 0."""
    count = math.ceil(9 * math.sqrt(servers)) + 40  # terms fall at least like exp(-j^2 / 2c)
    steps = np.arange(min(count, servers), dtype=np.float64)
    if load >= servers:
        return 1 / (1 + float(np.sum(np.cumprod((servers - steps) / load))))
    excess = (load - servers) / servers
    exponent = servers * (excess - math.log1p(excess)) + 1 / (12 * servers) - 1 / (360 * servers**3)
    if exponent > 700:
        return 0.0  # below 1e-300
    whole = math.sqrt(2 * math.pi * servers) * math.exp(exponent)
    tail = float(np.sum(np.cumprod(load / (servers + 1 + steps))))
    return 1 / (whole - tail)


def _check(servers: int, load: float) -> None:
    if servers < 0:
        raise ValueError(f"servers must be >= 0, got {servers}")
    if not (0 <= load < math.inf):
        raise ValueError(f"offered load must be finite and >= 0 erlang, got {load}")

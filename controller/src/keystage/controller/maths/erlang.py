"""Waiting times of queues with many servers: Erlang B and C, M/M/c, G/G/c.

Before it: the estimator gives rates and variations. After it: the corrector asks for the smallest
number of servers that meets a target. Pure arithmetic; it must not know stages or replicas.

Symbols: lambda arrival rate (1/s), mu service rate of one server (1/s), c servers,
a = lambda/mu offered load (erlang), rho = a/c utilisation, ca2 and cs2 squared coefficients of
variation of inter-arrival and service times.

    B(0) = 1,  B(c) = a B(c-1) / (c + a B(c-1))           Erlang loss, stable for any c
    C(c) = B(c) / (1 - rho (1 - B(c)))                    probability of waiting, rho < 1
    W_M/M/c = C(c) / (c mu - lambda)                      mean wait
    W_G/G/c ~ W_M/M/c (ca2 + cs2) / 2                     Allen and Cunneen (1978), rho < 1

Deviation: Eq. 1 of QUART (section 5.1), meant as the M/M/c delay, gives
P0 lambda / (mu (mu - lambda)) + 1/mu at c = 1 and stays finite as rho -> 1; the exact formula is
used instead. A sojourn is wait + service; the paper calls it queuing delay.
"""

from __future__ import annotations

import math


def erlang_b(servers: int, load: float) -> float:
    """Blocking probability of M/M/c/c.

    Args:
        servers: c >= 0.
        load: a = lambda/mu in erlang, finite and >= 0.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(servers, load)
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = _next_b(blocking, k, load)
    return blocking


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c; 1 when load >= servers.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(servers, load)
    if load >= servers:
        return 1.0
    return _c_from_b(erlang_b(servers, load), servers, load)


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

    One pass of the Erlang recursion: cost grows with the answer.

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
    blocking = 1.0
    for k in range(1, most):
        blocking = _next_b(blocking, k, load)
        if load < k and _c_from_b(blocking, k, load) * service_s / (k - load) * factor <= wait_s:
            return k
    return most


def _next_b(blocking: float, servers: int, load: float) -> float:
    return load * blocking / (servers + load * blocking)


def _c_from_b(blocking: float, servers: int, load: float) -> float:
    return blocking / (1 - load / servers * (1 - blocking))


def _check(servers: int, load: float) -> None:
    if servers < 0:
        raise ValueError(f"servers must be >= 0, got {servers}")
    if not (0 <= load < math.inf):
        raise ValueError(f"offered load must be finite and >= 0 erlang, got {load}")

"""Closed loops: a fixed number of sessions that go round a ring of stages.

Before it: service times of a decode ring, replicas per stage, sessions inside. After it: throughput,
cycle time, and which stage limits. Pure arithmetic; it must not know policies. In a ring a slow stage
slows its own arrivals, so its utilisation stays below 1 while sessions starve at the door: capacity is
read from here, waiting at the door from `entry_wait_s`. The corrector counts slots with
`policy.demand`, which finds the same wait; this module is its oracle in tests, and for reports.

Symbols: N customers (waves, or sessions that step alone), stage k with c_k servers of mean service s_k,
think time Z outside (seconds), D = sum s_k, X throughput (rounds/s), R = N/X - Z cycle time.

    bounds:  X <= min(N / (D + Z), min_k c_k / s_k),   R >= max(D, N / min_k(c_k/s_k) - Z)
    exact:   X(N) = G(N-1) / G(N),  G = f_1 * ... * f_K * f_Z  (convolution over the number of customers)
             f_k(n) = prod_{j<=n} s_k / min(j, c_k),   f_Z(n) = Z^n / n!
    knee:    N* = (D + Z) min_k c_k / s_k, where the two bounds on X meet

Source: asymptotic bounds of Denning and Buzen (1978); convolution of Buzen (1973), which is what mean
value analysis (Reiser and Lavenberg 1980) computes, but has no subtraction and so stays exact for stages
with many servers. All f are scaled, so nothing overflows.
Range of validity: exact for exponential services in arrival order (or any service, shared processor); for
steadier services X lies between this and the upper bound. Bounds hold for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keystage.controller.maths import erlang

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A closed loop in steady state.

    Attributes:
        throughput_rps: rounds a second of all customers together.
        cycle_s: mean time of one round inside the ring.
        queues: mean customers at each stage, waiting or in service.
        busy_ratios: busy part of each stage's servers.
        key_stage: index of the stage that limits (largest s_k / c_k, the first of equals).
    """

    throughput_rps: float
    cycle_s: float
    queues: tuple[float, ...]
    busy_ratios: tuple[float, ...]
    key_stage: int


@dataclasses.dataclass(frozen=True, slots=True)
class RingBounds:
    """What no service distribution can exceed.

    Attributes:
        throughput_rps: upper bound of rounds a second.
        cycle_s: lower bound of the time of a round.
        knee: customers up to which nobody need wait; more only queue.
        key_stage: index of the stage that limits.
    """

    throughput_rps: float
    cycle_s: float
    knee: float
    key_stage: int


def ring_bounds(
    services_s: Sequence[float], servers: Sequence[int], customers: int, think_s: float = 0.0
) -> RingBounds:
    """Asymptotic bounds of a ring.

    Args:
        services_s: mean service per stage and round, seconds, > 0 [K].
        servers: servers per stage, >= 1 [K].
        customers: N >= 0.
        think_s: Z >= 0 seconds between rounds.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(services_s, servers, customers, think_s)
    rates = [c / s for c, s in zip(servers, services_s, strict=True)]
    peak_rps = min(rates)
    empty_s = sum(services_s) + think_s
    return RingBounds(
        throughput_rps=min(customers / empty_s, peak_rps),
        cycle_s=max(sum(services_s), customers / peak_rps - think_s),
        knee=empty_s * peak_rps,
        key_stage=rates.index(peak_rps),
    )


def ring(services_s: Sequence[float], servers: Sequence[int], customers: int, think_s: float = 0.0) -> Ring:
    """Steady state of a ring with exponential services; cost K N^2.

    Arguments as in `ring_bounds`; with no customers the cycle is that of an empty ring.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(services_s, servers, customers, think_s)
    bounds = ring_bounds(services_s, servers, customers, think_s)
    if customers == 0:
        zeros = (0.0,) * len(services_s)
        return Ring(0.0, sum(services_s), zeros, zeros, bounds.key_stage)
    scale = max(s / c for s, c in zip(services_s, servers, strict=True))  # seconds per round at the limit
    n = np.arange(customers + 1, dtype=np.float64)
    factors = [
        _scaled(np.log(s / scale) - np.log(np.minimum(n[1:], c)))
        for s, c in zip(services_s, servers, strict=True)
    ]
    if think_s > 0:
        factors.append(_scaled(math.log(think_s / scale) - np.log(n[1:])))
    before, after = _products(factors, customers)
    whole = before[-1]
    throughput_rps = float(whole[customers - 1] / whole[customers] / scale)
    queues = []
    for k in range(len(services_s)):
        others = np.convolve(before[k], after[k])[: customers + 1]
        at_stage = factors[k] * others[::-1]  # weight of n customers here and N - n elsewhere
        queues.append(float(at_stage @ n / at_stage.sum()))
    return Ring(
        throughput_rps=throughput_rps,
        cycle_s=customers / throughput_rps - think_s,
        queues=tuple(queues),
        busy_ratios=tuple(throughput_rps * s / c for s, c in zip(services_s, servers, strict=True)),
        key_stage=bounds.key_stage,
    )


def entry_wait_s(
    arrival_rps: float, residence_s: float, replicas: int, slots: int, ca2: float, cs2: float
) -> float:
    """Mean wait of a session for a slot: G/G/c with servers = replicas x slots, service = residence.

    Raises:
        ValueError: an argument is out of its range.
    """
    if replicas < 0 or slots < 0:
        raise ValueError(f"replicas and slots must be >= 0, got {replicas} and {slots}")
    return erlang.ggc_wait_s(arrival_rps, residence_s, replicas * slots, ca2, cs2)


def _scaled(log_ratios: Floats) -> Floats:
    """f(0..N), times a constant that cancels in the end, from the logarithms of f(n) / f(n-1) [N]."""
    logs = np.concatenate(([0.0], np.cumsum(log_ratios)))
    scaled: Floats = np.exp(logs - logs.max())
    return scaled


def _products(factors: Sequence[Floats], customers: int) -> tuple[list[Floats], list[Floats]]:
    """Convolutions of the first k factors (k = 0..K), and of those after factor k, scaled."""
    one = np.zeros(customers + 1)
    one[0] = 1.0
    before = [one]
    for factor in factors:
        before.append(_unit(np.convolve(before[-1], factor)[: customers + 1]))
    after = [one]
    for factor in reversed(factors[1:]):
        after.append(_unit(np.convolve(after[-1], factor)[: customers + 1]))
    return before, after[::-1]


def _unit(values: Floats) -> Floats:
    scaled: Floats = values / values.max()
    return scaled


def _check(services_s: Sequence[float], servers: Sequence[int], customers: int, think_s: float) -> None:
    if not services_s or len(services_s) != len(servers):
        raise ValueError(
            f"a ring needs >= 1 stage; got {len(services_s)} services and {len(servers)} numbers of servers"
        )
    if not all(0 < s < math.inf for s in services_s):
        raise ValueError(f"services must be finite and > 0 s, got {list(services_s)}")
    if not all(c >= 1 for c in servers):
        raise ValueError(f"servers must be >= 1 at every stage, got {list(servers)}")
    if customers < 0:
        raise ValueError(f"customers must be >= 0, got {customers}")
    if not 0 <= think_s < math.inf:
        raise ValueError(f"think time must be finite and >= 0 s, got {think_s}")

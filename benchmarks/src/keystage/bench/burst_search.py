"""The best static allocation, found by search over an exact model. Pure.

Before it: `burst` knows what the controller used. After it: the best allocation is run live.
A stage with c replicas of constant service time s is a FIFO G/D/c queue, and departures keep the
order of arrivals, so customer i waits for customer i - c alone:

    d(i) = max(a(i), d(i - c)) + s        for i < c: d(i) = a(i) + s

that is c interleaved single-server recursions, each a running maximum. The departures of a stage are
the arrivals of the next one: the tandem is exact, hand-off aside (no formula, no simulation error).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Replicas per stage, and the modelled mean latency in seconds."""

    replicas: tuple[int, ...]
    mean_s: float

    @property
    def total(self) -> int:
        """Replicas in all."""
        return sum(self.replicas)


def departures_s(arrivals_s: Floats, service_s: float, servers: int) -> Floats:
    """Departure times of a FIFO G/D/c queue.

    Args:
        arrivals_s: ascending times, shape (customers,).
        service_s: constant service time.
        servers: c >= 1.
    """
    departures = np.empty_like(arrivals_s)
    for first in range(servers):
        mine = arrivals_s[first::servers]
        work_s = np.arange(len(mine)) * service_s
        departures[first::servers] = np.maximum.accumulate(mine - work_s) + work_s + service_s
    return departures


def mean_latency_s(arrivals_s: Floats, services_s: Sequence[float], replicas: Sequence[int]) -> float:
    """Mean time through the tandem."""
    departures = arrivals_s
    for service_s, servers in zip(services_s, replicas, strict=True):
        departures = departures_s(departures, service_s, servers)
    return float((departures - arrivals_s).mean())


def search(arrivals_s: Floats, services_s: Sequence[float], most: int) -> list[Allocation]:
    """Every allocation of at most `most` replicas, at least one per stage, the best first.

    Of equal ones the larger comes first: the baseline may use all it is given.

    Raises:
        ValueError: `most` does not give every stage a replica.
    """
    if most < len(services_s):
        raise ValueError(f"{most} replicas cannot serve {len(services_s)} stages")
    found: list[Allocation] = []

    def extend(replicas: tuple[int, ...], times_s: Floats) -> None:
        stage = len(replicas)
        if stage == len(services_s):
            found.append(Allocation(replicas, float((times_s - arrivals_s).mean())))
            return
        spare = most - sum(replicas) - (len(services_s) - stage - 1)
        for servers in range(1, spare + 1):
            extend((*replicas, servers), departures_s(times_s, services_s[stage], servers))

    extend((), arrivals_s)
    return sorted(found, key=lambda a: (round(a.mean_s, 9), -a.total, a.replicas))

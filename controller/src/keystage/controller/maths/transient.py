"""Queues that are not in steady state: backlogs, overload, and servers that become ready later.

Before it: backlog, rates, and when servers will be ready. After it: how many servers more it takes
(`policy.demand`), and, for tests and reports, how long it lasts and how high it gets.
A fluid model: pure arithmetic, no clock.

Symbols: q(t) items waiting, lambda arrival rate (1/s), mu items a server finishes a second, c(t) servers
ready at t (it only grows: c0 now, one more at each start), T seconds from now.

    dq/dt = lambda - mu c(t)  while q > 0 or lambda > mu c(t);  q >= 0
    drained by T with m more that are ready at s:
        q0 + lambda T <= mu (c0 T + sum_i (T - t_i)+ + m (T - s))
        m = ceil((q0 + lambda T - mu (c0 T + sum_i (T - t_i)+)) / (mu (T - s))),  T > s

Source: fluid limits of queues (Newell 1982, chapter 2). Range of validity: backlogs of many items, or
overload (lambda >= c mu), where chance matters less than the drift; in steady state below full load
it says 0 where `maths.erlang` has a wait.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """The course of a backlog.

    Attributes:
        time_s: seconds until it is gone for good; infinite when the servers never suffice.
        peak: most items waiting; infinite when it grows for ever.
        peak_s: when that is.
        waited_s: item-seconds waited in all (area below q), infinite likewise.
    """

    time_s: float
    peak: float
    peak_s: float
    waited_s: float


def drain(
    backlog: float, arrival_rps: float, server_rps: float, ready: int, starts_s: Sequence[float] = ()
) -> Drain:
    """Follows the backlog until it is gone.

    Args:
        backlog: items waiting now, >= 0.
        arrival_rps: lambda, constant from now on.
        server_rps: mu of one server, > 0.
        ready: servers ready now.
        starts_s: seconds from now at which one more is ready each, in any order; past times count as now.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(backlog, arrival_rps, server_rps, ready, starts_s)
    queue, at_s, servers = backlog, 0.0, ready
    peak, peak_s, waited_s = backlog, 0.0, 0.0
    for start_s in [*sorted(max(0.0, t) for t in starts_s), math.inf]:
        drift_rps = arrival_rps - server_rps * servers
        if drift_rps <= 0 and queue == 0:
            return Drain(at_s, peak, peak_s, waited_s)
        if drift_rps < 0 and queue <= -drift_rps * (start_s - at_s):
            last_s = queue / -drift_rps
            return Drain(at_s + last_s, peak, peak_s, waited_s + queue * last_s / 2)
        if start_s == math.inf:
            break
        span_s = start_s - at_s
        later = max(0.0, queue + drift_rps * span_s)
        waited_s += (queue + later) / 2 * span_s
        queue, at_s, servers = later, start_s, servers + 1
        if queue > peak:
            peak, peak_s = queue, at_s
    if drift_rps > 0:
        return Drain(math.inf, math.inf, math.inf, math.inf)
    return Drain(math.inf, peak, peak_s, math.inf)  # exactly balanced: the queue stays


def servers_to_drain(
    backlog: float,
    arrival_rps: float,
    server_rps: float,
    ready: int,
    starts_s: Sequence[float],
    start_s: float,
    within_s: float,
    most: int,
) -> int:
    """How many servers more, ready `start_s` from now, have the backlog gone within `within_s`.

    Args:
        backlog: items waiting now, >= 0.
        arrival_rps: lambda, constant from now on.
        server_rps: mu of one server, > 0.
        ready: servers ready now.
        starts_s: seconds from now at which servers asked for before are ready.
        start_s: seconds a new server takes, >= 0 (dead time).
        within_s: seconds from now, > 0.
        most: bound of the answer; given too where no number does it (within_s <= start_s).

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(backlog, arrival_rps, server_rps, ready, starts_s)
    if not (start_s >= 0 and within_s > 0 and most >= 0):
        raise ValueError(
            f"need start_s >= 0, within_s > 0 and most >= 0, got {start_s} s, {within_s} s and {most}"
        )
    served_s = ready * within_s + sum(max(0.0, within_s - max(0.0, t)) for t in starts_s)
    short_s = (backlog + arrival_rps * within_s) / server_rps - served_s  # server-seconds that are missing
    if short_s <= 1e-9 * served_s:
        return 0
    if within_s <= start_s:
        return most
    return min(most, math.ceil(min(most, short_s / (within_s - start_s)) * (1 - 1e-9)))


def burst_peak(
    burst_rps: float, burst_s: float, server_rps: float, ready: int, backlog: float = 0.0
) -> float:
    """Items waiting at the end of a burst: q0 + (lambda - c mu) T while that is positive.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check(backlog, burst_rps, server_rps, ready, ())
    if not 0 <= burst_s < math.inf:
        raise ValueError(f"a burst must last a finite time >= 0 s, got {burst_s}")
    return max(backlog, 0.0, backlog + (burst_rps - ready * server_rps) * burst_s)


def _check(
    backlog: float, arrival_rps: float, server_rps: float, ready: int, starts_s: Sequence[float]
) -> None:
    if not 0 <= backlog < math.inf:
        raise ValueError(f"backlog must be finite and >= 0 items, got {backlog}")
    if not 0 <= arrival_rps < math.inf:
        raise ValueError(f"arrival rate must be finite and >= 0 /s, got {arrival_rps}")
    if not 0 < server_rps < math.inf:
        raise ValueError(f"service rate must be finite and > 0 /s, got {server_rps}")
    if ready < 0:
        raise ValueError(f"ready servers must be >= 0, got {ready}")
    if not all(math.isfinite(t) for t in starts_s):
        raise ValueError(f"start times must be finite seconds, got {list(starts_s)}")

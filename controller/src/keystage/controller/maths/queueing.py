"""The waits of `maths.erlang` for many stages at once, with numpy.

Before it: arrays of rates, services and targets. After it: those who size many stages in one call, and
tables; the policy itself looks at few stages of few pipelines a tick, where the scalar search is quicker.
Every function gives, entry by entry, the very number its scalar counterpart gives: the same operations in
the same order. Like those it must not know stages or replicas.

Symbols, equations, sources and ranges: see `maths.erlang`. All arrays have one shape [n], or broadcast
to it. Where the scalar function raises, an entry is NaN (or 0 servers): one garbled stage must not
keep the others from an answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keystage.controller.maths import erlang

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def erlang_c_many(servers: npt.ArrayLike, load: npt.ArrayLike) -> Floats:
    """Probability that an arrival waits in M/M/c, per entry.

    Args:
        servers: c >= 0, integers.
        load: offered load in erlang.

    Returns:
        C [n]; 1 where load >= servers, NaN where an argument is out of its range.
    """
    counts, loads = np.broadcast_arrays(np.asarray(servers, dtype=np.int64), _floats(load))
    count, offered = counts.ravel(), loads.ravel()
    valid = (count >= 0) & (offered >= 0) & (offered < np.inf)
    answer = np.where(valid, 1.0, np.nan)
    stable = np.flatnonzero(valid & (offered < count))
    c, a = count[stable], offered[stable]
    blocking = _erlang_b(c, a)
    answer[stable] = c * blocking / (c - a + a * blocking)
    return answer.reshape(counts.shape)


def ggc_wait_many(
    arrival_rps: npt.ArrayLike,
    service_s: npt.ArrayLike,
    servers: npt.ArrayLike,
    ca2: npt.ArrayLike,
    cs2: npt.ArrayLike,
) -> Floats:
    """Mean G/G/c waits in seconds by Allen and Cunneen, per entry.

    Returns:
        Waits [n]; infinite where the servers cannot keep up, NaN where an argument is out of its range.
    """
    service, ca, cs = _floats(service_s), _floats(ca2), _floats(cs2)
    load = _floats(arrival_rps) * service
    c = np.asarray(servers, dtype=np.int64)
    probability = erlang_c_many(c, load)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        wait_s = probability * service / (c - load)
        wait_s = np.where((load >= c) & ~np.isnan(probability), np.inf, wait_s * (ca + cs) / 2)
    return np.where((ca >= 0) & (cs >= 0), wait_s, np.nan)


def servers_for_wait_many(
    arrival_rps: npt.ArrayLike,
    service_s: npt.ArrayLike,
    ca2: npt.ArrayLike,
    cs2: npt.ArrayLike,
    wait_s: npt.ArrayLike,
    most: npt.ArrayLike,
) -> Ints:
    """The smallest c in 1..most with a mean G/G/c wait of at most `wait_s`, per entry.

    Returns:
        c [n]; `most` where no c in the range does, 0 where an argument is out of its range.
    """
    arrays = np.broadcast_arrays(
        _floats(arrival_rps),
        _floats(service_s),
        _floats(ca2),
        _floats(cs2),
        _floats(wait_s),
        np.asarray(most, dtype=np.int64),
    )
    rate, service, ca, cs, target, bound = (array.ravel() for array in arrays)
    load = rate * service
    factor = (ca + cs) / 2
    valid = (load >= 0) & (load < np.inf) & (factor >= 0) & (target >= 0) & (bound >= 0)
    answer = np.where(valid, bound, 0)
    open_ = valid & (load < bound)
    for i in np.flatnonzero(open_ & (load >= erlang.MANY_SERVERS - 1)):
        answer[i] = erlang.servers_for_wait(rate[i], service[i], ca[i], cs[i], target[i], int(bound[i]))
    index = np.flatnonzero(open_ & (load < erlang.MANY_SERVERS - 1))
    a, s, w, f, m = (x[index] for x in (load, service, target, factor, bound))
    _search(answer, index, a, s, w, f, m)
    return answer.reshape(arrays[0].shape)


def _search(
    answer: Ints, index: Ints, load: Floats, service_s: Floats, wait_s: Floats, factor: Floats, most: Ints
) -> None:
    """Steps c up for all entries together; an entry leaves when its wait is short enough.

    Entries are sorted by load, so those that keep up with c servers are always a prefix.
    """
    order = np.argsort(load, kind="stable")
    index, m = index[order], most[order]
    a, s, w, f = load[order], service_s[order], wait_s[order], factor[order]
    blocking = np.ones(len(a))
    k = 0
    while len(a):
        k += 1
        offered = a * blocking
        blocking = offered / (k + offered)
        n = int(np.searchsorted(a, k))  # load < k
        if not n:
            continue
        b, head = blocking[:n], a[:n]
        with np.errstate(over="ignore", invalid="ignore"):
            done = k * b / (k - head + head * b) * s[:n] / (k - head) * f[:n] <= w[:n]
        if not np.any(done | (m[:n] <= k)):
            continue
        answer[index[:n][done]] = np.minimum(k, m[:n][done])
        keep = np.ones(len(a), dtype=bool)
        keep[:n] = ~(done | (m[:n] <= k))
        index, m = index[keep], m[keep]
        a, s, w, f, blocking = a[keep], s[keep], w[keep], f[keep], blocking[keep]


def _erlang_b(servers: Ints, load: Floats) -> Floats:
    """B per entry: one recursion for all; sorted, so those that still run are always a suffix."""
    answer = np.ones(len(servers))
    many = np.flatnonzero((servers >= erlang.MANY_SERVERS) & (load > 0))
    for i in many:
        answer[i] = erlang.erlang_b(int(servers[i]), float(load[i]))
    few = np.flatnonzero((servers < erlang.MANY_SERVERS) | (load <= 0))
    few = few[np.argsort(servers[few], kind="stable")]
    c, a = np.minimum(servers[few], erlang.MANY_SERVERS), load[few]
    blocking = np.ones(len(few))
    for k in range(1, int(c[-1]) + 1 if len(c) else 0):
        start = int(np.searchsorted(c, k))
        offered = a[start:] * blocking[start:]
        blocking[start:] = offered / (k + offered)
    answer[few] = blocking
    return answer


def _floats(values: npt.ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)

"""Divides models over sub-clusters: Symphony's appendix A within a time limit. Pure.

Before it: request rates and memory sizes of the models, and the division of the last epoch. After it:
replicas of a sub-cluster load its models (`Scheduler.add_replica(replica, models)`).

Way: bounds that no division can meet are named first. Small problems are solved to the end by the MILP.
Others start with largest-first and exchanges (`partition_local`); then the MILP works on the two sub-clusters
that are furthest apart, again and again, where it finds what no single exchange does; on the whole, with
the value found so far as its cut-off; and on pairs again. An answer within `gap_ratio` of the bound ends it
early.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from keystage.batching import partition_milp as milp
from keystage.batching.partition_feasible import first, sums
from keystage.batching.partition_local import (
    Descent,
    Indices,
    Tables,
    is_within,
    largest_first,
    tables,
    value,
)
from keystage.batching.partition_problem import Division, Problem, division

LIMIT_S = 10.0
"""Symphony's time limit."""
GAP_RATIO = 1e-3
"""Nobody can use a better balance than a thousandth of the mean: rates are estimates."""
SMALL = 48
"""Binaries up to which the whole is solved to the end at once."""

PAIR_S = 0.5
"""Seconds HiGHS gets for two sub-clusters; most finds come in the first tenth."""


def partition(
    problem: Problem,
    clock_s: Callable[[], float],
    *,
    limit_s: float = LIMIT_S,
    gap_ratio: float = GAP_RATIO,
) -> Division:
    """Divides the models.

    Args:
        problem: models, bounds, the division there is.
        clock_s: seconds of any monotonic clock.
        limit_s: an answer is there after about this.
        gap_ratio: an answer whose objective is within this of the best possible is good enough.

    Raises:
        PartitionError: a bound cannot be met, or no division that meets it was found within the limit.
    """
    end_s = clock_s() + limit_s
    sums(problem)
    tab = tables(problem)
    if len(tab.rate) * tab.clusters <= SMALL:
        exact = milp.solve(tab, limit_s)
        if exact.assigned is not None and exact.is_proven and is_within(tab, exact.assigned):
            return division(problem, exact.assigned.tolist(), "optimal", exact.bound)
    search = Descent(tab, largest_first(tab))
    half_s = clock_s() + 0.4 * limit_s
    search.run(lambda: clock_s() >= half_s)
    best = search.assigned
    if not is_within(tab, best):
        best = first(problem, tab, end_s - clock_s())
        search = Descent(tab, best)
        search.run(lambda: clock_s() >= end_s)
        best = search.assigned
    bound = _bound(tab, end_s - clock_s())
    if value(tab, best) - bound <= gap_ratio:
        return division(problem, best.tolist(), "gap", bound)
    best = _parts(tab, best, bound + gap_ratio, clock_s() + 0.3 * (end_s - clock_s()), clock_s)
    if value(tab, best) - bound <= gap_ratio:
        return division(problem, best.tolist(), "gap", bound)
    best, bound, is_proven = _whole(tab, best, bound, 0.4 * (end_s - clock_s()))
    if is_proven:
        return division(problem, best.tolist(), "optimal", bound)
    best = _parts(tab, best, bound + gap_ratio, end_s, clock_s)
    status = "gap" if value(tab, best) - bound <= gap_ratio else "time limit"
    return division(problem, best.tolist(), status, bound)


def _bound(tab: Tables, limit_s: float) -> float:
    """What the objective cannot be below: 0, unless moves are bounded (the linear relaxation then)."""
    if not math.isfinite(tab.most_cost):
        return 0.0
    return max(0.0, milp.solve(tab, limit_s, is_relaxed=True).bound)


def _whole(tab: Tables, best: Indices, bound: float, limit_s: float) -> tuple[Indices, float, bool]:
    """The MILP on all models: a better division if it finds one, a better bound, whether it was solved."""
    now = value(tab, best)
    found = milp.solve(tab, limit_s, below=now * (1 - 1e-6))
    if found.assigned is None:  # nothing is better, or no time to find it
        return best, now if found.is_proven else max(bound, min(now, found.bound)), found.is_proven
    better = found.assigned if is_within(tab, found.assigned) else best
    return better, max(bound, found.bound), found.is_proven and better is found.assigned


def _parts(tab: Tables, best: Indices, enough: float, end_s: float, clock_s: Callable[[], float]) -> Indices:
    """The MILP on the sub-clusters furthest apart, and exchanges after each find, until time is over."""
    tried: set[tuple[int, ...]] = set()
    while value(tab, best) > enough and end_s - clock_s() > 0.05:
        group = _apart(tab, best, tried)
        if group is None:
            break
        limit_s = min(PAIR_S, end_s - clock_s())
        now = value(tab, best)
        found = milp.solve(tab, limit_s, base=best, clusters=np.array(group), below=now * (1 - 1e-6))
        tried.add(group)
        if found.assigned is None or not is_within(tab, found.assigned):
            continue
        after = Descent(tab, found.assigned)
        after.run(lambda: clock_s() >= end_s)
        candidates = (found.assigned, after.assigned)
        better = min((c for c in candidates if is_within(tab, c)), key=lambda c: value(tab, c))
        if value(tab, better) < now:
            best = better
            tried.clear()
    return best


def _apart(tab: Tables, assigned: Indices, tried: set[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Sub-clusters worth solving together: one of the worst and its opposites, not tried since a find."""
    rate = np.bincount(assigned, tab.rate, tab.clusters) - 1.0
    static = np.bincount(assigned, tab.static, tab.clusters) - 1.0
    order = np.argsort(-(np.abs(rate) + tab.weight * np.abs(static)))
    for a in order:
        against = rate[a] * rate + tab.weight * static[a] * static  # most negative: the opposite direction
        for b in np.argsort(against):
            group = tuple(sorted((int(a), int(b))))
            if a != b and group not in tried:
                return group
    return None

"""A good division fast: largest first, then moves and swaps. Pure.

Before it: `partition_problem`. After it: the MILP (`partition_milp`) tries to beat what this finds; HiGHS as
SciPy offers it takes no first solution, so the search is given its value as a cut-off instead. What is
minimised here is the sum of squared deviations, which, unlike the maximum, tells a step in the right
direction from none; bounds that are missed weigh far more than any imbalance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from keystage.batching.partition_problem import Problem

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

MISSED = 1e6
"""Weight of a missed bound (in parts of the mean) beside an imbalance."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """A problem as arrays, in parts of the sub-clusters' means, so that all are near 1.

    Attributes:
        rate: float64[m].
        static: float64[m].
        dynamic: float64[m], in parts of the static mean.
        move: float64[m, l], cost of having model i at j when it is at `current` now.
        most_rate: R_max; most_memory: S_max; most_cost: C_max.
        weight: of memory in the objective.
        clusters: l.
        current: int64[m], -1 for a new model, or None.
    """

    rate: Floats
    static: Floats
    dynamic: Floats
    move: Floats
    most_rate: float
    most_memory: float
    most_cost: float
    weight: float
    clusters: int
    current: Indices | None


def tables(problem: Problem) -> Tables:
    """Makes the arrays."""
    count, clusters = len(problem.models), problem.bounds.sub_clusters
    rate = np.array([m.rate_rps for m in problem.models], dtype=np.float64)
    static = np.array([m.static_bytes for m in problem.models], dtype=np.float64)
    dynamic = np.array([m.dynamic_bytes for m in problem.models], dtype=np.float64)
    mean_rate, mean_static = rate.sum() / clusters or 1.0, static.sum() / clusters or 1.0
    move = np.zeros((count, clusters))
    current = None
    if problem.current is not None:
        costs = np.ones((count, clusters)) if problem.costs is None else np.array(problem.costs, dtype=float)
        current = np.array(problem.current, dtype=np.int64)
        placed = np.flatnonzero(current >= 0)
        move = costs.copy()
        move[placed] += costs[placed, current[placed]][:, None]
        move[placed, current[placed]] = 0.0
    return Tables(
        rate=rate / mean_rate,
        static=static / mean_static,
        dynamic=dynamic / mean_static,
        move=move,
        most_rate=problem.bounds.rate_rps / mean_rate,
        most_memory=problem.bounds.memory_bytes / mean_static,
        most_cost=problem.bounds.disruption,
        weight=problem.weight,
        clusters=clusters,
        current=current,
    )


def largest_first(tab: Tables) -> Indices:
    """Models that have no place, the largest first, each where it does the least harm."""
    count = len(tab.rate)
    assigned = np.full(count, -1) if tab.current is None else tab.current.copy()
    rate, static = np.zeros(tab.clusters), np.zeros(tab.clusters)
    dynamic = np.zeros(tab.clusters)
    for i in np.flatnonzero(assigned >= 0):
        j = assigned[i]
        rate[j] += tab.rate[i]
        static[j] += tab.static[i]
        dynamic[j] = max(dynamic[j], tab.dynamic[i])
    for i in sorted(np.flatnonzero(assigned < 0), key=lambda i: -max(tab.rate[i], tab.static[i])):
        after_rate, after_static = rate + tab.rate[i], static + tab.static[i]
        memory = after_static + np.maximum(dynamic, tab.dynamic[i])
        harm = after_rate**2 - rate**2 + tab.weight * (after_static**2 - static**2)
        harm += MISSED * (np.maximum(0, after_rate - tab.most_rate) + np.maximum(0, memory - tab.most_memory))
        j = int(np.argmin(harm))
        assigned[i] = j
        rate[j], static[j] = after_rate[j], after_static[j]
        dynamic[j] = max(dynamic[j], tab.dynamic[i])
    return assigned.astype(np.int64)


class Descent:
    """Moves and swaps of models that lower the sum of squares, within the disruption bound.

    Args:
        tab: the problem.
        assigned: where to start, int64[m]; copied.
    """

    def __init__(self, tab: Tables, assigned: Indices) -> None:
        self._tab = tab
        self.assigned = assigned.copy()
        self._rate: Floats = np.bincount(assigned, tab.rate, tab.clusters).astype(np.float64)
        self._static: Floats = np.bincount(assigned, tab.static, tab.clusters).astype(np.float64)
        self._cost = float(tab.move[np.arange(len(assigned)), assigned].sum())

    def run(self, is_over: Callable[[], bool]) -> None:
        """Takes the best step of the worst sub-cluster until no sub-cluster has one, or time is over."""
        while not is_over():
            order = np.argsort(-self._potential(self._rate, self._static, self._largest()))
            if not any(self._step(int(a)) for a in order):
                return

    def _largest(self) -> Floats:
        """Largest dynamic memory of each sub-cluster, float64[l]."""
        largest = np.zeros(self._tab.clusters)
        np.maximum.at(largest, self.assigned, self._tab.dynamic)
        return largest

    def _potential(self, rate: Floats, static: Floats, dynamic: Floats) -> Any:
        """What is minimised, of each sub-cluster with these totals; any one shape."""
        tab = self._tab
        value = (rate - 1.0) ** 2 + tab.weight * (static - 1.0) ** 2
        missed = np.maximum(0.0, rate - tab.most_rate) + np.maximum(0.0, static + dynamic - tab.most_memory)
        return value + MISSED * missed

    def _step(self, a: int) -> bool:
        """The best move out of or swap with sub-cluster `a`, if one helps."""
        tab = self._tab
        inside = np.flatnonzero(self.assigned == a)
        outside = np.flatnonzero(self.assigned != a)
        if not len(inside) and not len(outside):
            return False
        largest = self._largest()
        now = self._potential(self._rate, self._static, largest)
        # -1 stands for "nothing": moves one way or the other are swaps with nothing.
        give, take = np.append(inside, -1), np.append(outside, -1)
        kept = self._without(give, a, largest)
        best, found = -1e-12, None
        for b in range(tab.clusters):
            if b == a:
                continue
            own = np.append(take[:-1][self.assigned[take[:-1]] == b], -1)
            gain, k = self._exchange(a, b, give, own, kept, largest, now[a] + now[b])
            if gain < best:
                best, found = gain, (b, give[k[0]], own[k[1]])
        if found is None:
            return False
        b, out, into = found
        if out >= 0:
            self._put(int(out), b)
        if into >= 0:
            self._put(int(into), a)
        return True

    def _exchange(
        self, a: int, b: int, give: Indices, take: Indices, kept: Floats, largest: Floats, now: float
    ) -> tuple[float, tuple[int, int]]:
        """The best exchange of one of `give` (at a) against one of `take` (at b): change, and which."""
        tab = self._tab
        rate_g, rate_t = _of(tab.rate, give)[:, None], _of(tab.rate, take)[None, :]
        static_g, static_t = _of(tab.static, give)[:, None], _of(tab.static, take)[None, :]
        dynamic_g, dynamic_t = _of(tab.dynamic, give)[:, None], _of(tab.dynamic, take)[None, :]
        shift_rate, shift_static = rate_t - rate_g, static_t - static_g
        at_a = np.maximum(kept[:, None], dynamic_t)
        at_b = np.maximum(self._without(take, b, largest)[None, :], dynamic_g)
        after = self._potential(self._rate[a] + shift_rate, self._static[a] + shift_static, at_a)
        after = after + self._potential(self._rate[b] - shift_rate, self._static[b] - shift_static, at_b)
        cost = self._cost + self._extra(give, a, b)[:, None] + self._extra(take, b, a)[None, :]
        after = np.where(cost > tab.most_cost * (1 + 1e-12), np.inf, after)
        k = np.unravel_index(int(np.argmin(after)), after.shape)
        return float(after[k]) - now, (int(k[0]), int(k[1]))

    def _extra(self, models: Indices, old: int, new: int) -> Floats:
        """What moving each model adds to the disruption; -1 adds nothing."""
        extra = self._tab.move[models, new] - self._tab.move[models, old]
        return np.where(models < 0, 0.0, extra)

    def _without(self, models: Indices, j: int, largest: Floats) -> Floats:
        """Largest dynamic memory at j when each of the models (of j) is away."""
        left = np.full(len(models), largest[j])
        values = self._tab.dynamic[self.assigned == j]
        if len(values) == 0:
            return left
        top = values.max()
        second = np.partition(values, -2)[-2] if len(values) > 1 else 0.0
        return np.where((models >= 0) & (self._tab.dynamic[models] >= top), second, left)

    def _put(self, i: int, j: int) -> None:
        old = self.assigned[i]
        for totals, values in ((self._rate, self._tab.rate), (self._static, self._tab.static)):
            totals[old] -= values[i]
            totals[j] += values[i]
        self._cost += self._tab.move[i, j] - self._tab.move[i, old]
        self.assigned[i] = j


def _of(values: Floats, models: Indices) -> Floats:
    """values[models], 0 for -1."""
    return np.where(models < 0, 0.0, values[models])


def value(tab: Tables, assigned: Indices) -> float:
    """The objective of a division."""
    rate = np.bincount(assigned, tab.rate, tab.clusters)
    static = np.bincount(assigned, tab.static, tab.clusters)
    spread = float(np.abs(rate - rate.mean()).max())
    return spread + tab.weight * float(np.abs(static - static.mean()).max())


def is_within(tab: Tables, assigned: Indices) -> bool:
    """Whether all bounds are kept."""
    rate = np.bincount(assigned, tab.rate, tab.clusters)
    static = np.bincount(assigned, tab.static, tab.clusters)
    largest = np.zeros(tab.clusters)
    np.maximum.at(largest, assigned, tab.dynamic)
    cost = float(tab.move[np.arange(len(assigned)), assigned].sum())
    slack = 1 + 1e-9
    return bool(
        rate.max() <= tab.most_rate * slack
        and (static + largest).max() <= tab.most_memory * slack
        and cost <= tab.most_cost * slack
    )

"""Appendix A's mixed integer linear programme, on all models or on those of some sub-clusters. Pure.

Variables, in this order: x_ij for the free models i and the chosen sub-clusters j, then dR, dS, then (where
memory is bounded) the largest dynamic memory D_j of each sub-cluster, which makes (5) linear:
D_j >= d_i x_ij and sum_i s_i x_ij + D_j <= S_max. |x - x'| of (10) is linear in x, since x' is 0 or 1.
Without a current division the sub-clusters are alike, so model k may be held to the first k + 1 of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from keystage.batching.partition_local import Indices, Tables

AIMS = ("balance", "excess", "disruption")
"""What is minimised: (3); by how much (4) and (5) must be missed; the left side of (10)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """What HiGHS came back with.

    Attributes:
        assigned: int64[m], None where it found no division.
        bound: no division of this programme has a smaller aim.
        value: the aim's value, in parts of the means; infinity without a division.
        excess: of `excess`: by how much requests and memory miss their bounds.
        is_proven: whether it was solved to the end (or shown to have no solution).
    """

    assigned: Indices | None
    bound: float
    value: float
    excess: tuple[float, float]
    is_proven: bool


def solve(
    tab: Tables,
    limit_s: float,
    *,
    aim: str = "balance",
    base: Indices | None = None,
    clusters: npt.NDArray[np.int64] | None = None,
    below: float = math.inf,
    is_relaxed: bool = False,
) -> Solved:
    """Solves the programme.

    Args:
        tab: the problem.
        limit_s: HiGHS stops after so many seconds.
        aim: one of `AIMS`.
        base: with `clusters`: the division whose other models stay where they are.
        clusters: sub-clusters whose models are free to change among them; None: all.
        below: only divisions whose dR + w dS is at most this are wanted.
        is_relaxed: x may be fractions: a bound, no division.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(tab.rate)
    chosen = np.arange(tab.clusters) if clusters is None else clusters
    free = np.arange(count) if base is None else np.flatnonzero(np.isin(base, chosen))
    rows = _Rows(tab, free, chosen, aim, _left(tab, base, free))
    if math.isfinite(below):
        rows.cut(below)
    matrix, low, high = rows.constraints()
    binaries = len(free) * len(chosen)
    integrality = np.zeros(rows.columns)
    integrality[:binaries] = 0 if is_relaxed else 1
    upper = np.full(rows.columns, np.inf)
    upper[:binaries] = 1.0
    if tab.current is None and base is None:
        order = np.argsort(-np.maximum(tab.rate, tab.static), kind="stable")
        for k, i in enumerate(order[: tab.clusters]):
            upper[i * tab.clusters + k + 1 : (i + 1) * tab.clusters] = 0.0
    result: Any = milp(
        rows.aims(),
        integrality=integrality,
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": max(0.01, limit_s), "mip_rel_gap": 1e-6},
    )
    return _read(result, rows, base, free, chosen, is_relaxed)


def _left(tab: Tables, base: Indices | None, free: Indices) -> float:
    """What of the disruption bound is left to the free models."""
    if base is None:
        return tab.most_cost
    kept = np.ones(len(tab.rate), dtype=bool)
    kept[free] = False
    return tab.most_cost - float(tab.move[kept, base[kept]].sum())


def _read(
    result: Any, rows: _Rows, base: Indices | None, free: Indices, chosen: Indices, is_relaxed: bool
) -> Solved:
    """A SciPy result in our words."""
    is_proven = result.status in (0, 2)
    if result.status == 2:
        return Solved(None, math.inf, math.inf, (math.inf, math.inf), True)
    bound = result.mip_dual_bound
    bound = float(bound) if bound is not None and math.isfinite(bound) else 0.0
    if is_relaxed and result.status == 0:
        bound = float(result.fun)
    if result.x is None:
        return Solved(None, bound, math.inf, (math.inf, math.inf), is_proven)
    x = result.x[: len(free) * len(chosen)].reshape(len(free), len(chosen))
    assigned = np.zeros(len(rows.tab.rate), dtype=np.int64) if base is None else base.copy()
    assigned[free] = chosen[np.argmax(x, axis=1)]
    excess = (float(result.x[-2]), float(result.x[-1])) if rows.aim == "excess" else (0.0, 0.0)
    return Solved(None if is_relaxed else assigned, bound, float(result.fun), excess, is_proven)


class _Rows:
    """The constraint matrix, by blocks.

    Args:
        tab: the problem.
        free: models that may change.
        chosen: sub-clusters they may be at.
        aim: one of `AIMS`.
        left: what their changes may cost.
    """

    def __init__(self, tab: Tables, free: Indices, chosen: Indices, aim: str, left: float) -> None:
        self.tab = tab
        self.aim = aim
        self._free = free
        self._chosen = chosen
        self._left = left
        self._l = len(chosen)
        self._spread = len(free) * self._l  # column of dR; dS follows
        self._dynamic = self._spread + 2
        self._has_memory = math.isfinite(tab.most_memory)
        self._elastic = self._dynamic + (self._l if self._has_memory else 0)
        self.columns = self._elastic + (2 if aim == "excess" else 0)
        self._entries: list[tuple[Any, Any, Any]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def aims(self) -> npt.NDArray[np.float64]:
        """Coefficients of what is minimised, float64[columns]."""
        aims = np.zeros(self.columns)
        if self.aim == "balance":
            aims[self._spread], aims[self._spread + 1] = 1.0, self.tab.weight
        elif self.aim == "excess":
            aims[self._elastic :] = 1.0
        else:
            aims[: self._spread] = self.tab.move[np.ix_(self._free, self._chosen)].ravel()
        return aims

    def cut(self, below: float) -> None:
        """Only divisions at most this good are of use."""
        self._row([self._spread, self._spread + 1], [1.0, self.tab.weight], -math.inf, below)

    def constraints(self) -> tuple[Any, list[float], list[float]]:
        """The sparse matrix and both sides."""
        from scipy.sparse import csr_matrix

        tab, free, width = self.tab, self._free, self._l
        for k in range(len(free)):  # (8)
            self._row(range(k * width, (k + 1) * width), np.ones(width), 1.0, 1.0)
        means = float(tab.rate.sum()) / tab.clusters, float(tab.static.sum()) / tab.clusters
        for j in range(width):
            x_j = np.arange(len(free)) * width + j
            rate, static = tab.rate[free], tab.static[free]
            if self.aim == "balance":  # (6), (7)
                for amounts, mean, spread in (
                    (rate, means[0], self._spread),
                    (static, means[1], self._spread + 1),
                ):
                    columns = np.append(x_j, spread)
                    self._row(columns, np.append(amounts, -1.0), -math.inf, mean)
                    self._row(columns, np.append(amounts, 1.0), mean, math.inf)
            self._capacity(j, x_j, rate, static)
        if self.aim != "disruption" and math.isfinite(self._left):  # (10)
            cost = tab.move[np.ix_(free, self._chosen)].ravel()
            used = np.flatnonzero(cost)
            self._row(used, cost[used], -math.inf, self._left * (1 + 1e-12))
        rows = np.concatenate([np.full(len(c), r) for r, c, _ in self._entries])
        columns = np.concatenate([c for _, c, _ in self._entries])
        values = np.concatenate([v for _, _, v in self._entries])
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self._low), self.columns))
        return matrix, self._low, self._high

    def _capacity(self, j: int, x_j: Indices, rate: Any, static: Any) -> None:
        """(4) and (5) of one sub-cluster."""
        tab, slack = self.tab, self.aim == "excess"
        if math.isfinite(tab.most_rate):
            columns = np.append(x_j, self._elastic) if slack else x_j
            self._row(columns, np.append(rate, -1.0) if slack else rate, -math.inf, tab.most_rate)
        if not self._has_memory:
            return
        columns, values = np.append(x_j, self._dynamic + j), np.append(static, 1.0)
        if slack:
            columns, values = np.append(columns, self._elastic + 1), np.append(values, -1.0)
        self._row(columns, values, -math.inf, tab.most_memory)
        for k in np.flatnonzero(tab.dynamic[self._free] > 0):
            pair = [k * self._l + j, self._dynamic + j]
            self._row(pair, [-tab.dynamic[self._free[k]], 1.0], 0.0, math.inf)

    def _row(self, columns: Any, values: Any, low: float, high: float) -> None:
        """One constraint low <= values . columns <= high."""
        self._entries.append((len(self._low), np.asarray(columns, dtype=np.int64), np.asarray(values, float)))
        self._low.append(low)
        self._high.append(high)

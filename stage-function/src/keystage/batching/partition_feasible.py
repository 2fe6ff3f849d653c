"""Which bound no division can meet, and by how much. Pure.

Before it: `partition_problem`. Sums tell at once (a model that fits nowhere, all of them too much for all
sub-clusters); whether pieces fit together at all is asked of the MILP, whose aim is then the excess.
"""

from __future__ import annotations

import math

from keystage.batching import partition_milp as milp
from keystage.batching.partition_local import Indices, Tables, is_within
from keystage.batching.partition_problem import ROUNDING, PartitionError, Problem


def sums(problem: Problem) -> None:
    """What one look tells.

    Raises:
        PartitionError: a model alone, or all together, miss a bound.
    """
    bounds, models = problem.bounds, problem.models
    for model in models:
        _check("rate_rps", model.rate_rps, bounds.rate_rps, f"{model.name} alone has", "requests/s")
        own = model.static_bytes + model.dynamic_bytes
        _check("memory_bytes", own, bounds.memory_bytes, f"{model.name} alone takes", "bytes")
    count = bounds.sub_clusters
    whole = f"all {len(models)} models together"
    rate = sum(model.rate_rps for model in models)
    _check("rate_rps", rate, count * bounds.rate_rps, f"{whole} have", "requests/s", count)
    memory = sum(model.static_bytes for model in models) + max(model.dynamic_bytes for model in models)
    _check("memory_bytes", memory, count * bounds.memory_bytes, f"{whole} take", "bytes", count)


def _check(bound: str, amount: float, most: float, who: str, unit: str, count: int = 1) -> None:
    if amount > most * (1 + ROUNDING):
        where = "a sub-cluster may have" if count == 1 else f"{count} sub-clusters may have"
        raise PartitionError(
            bound,
            amount - most,
            f"{bound}: {who} {amount:.6g} {unit}, {where} {most:.6g}: {amount - most:.6g} too much",
        )


def first(problem: Problem, tab: Tables, limit_s: float) -> Indices:
    """Any division within all bounds, by the MILP.

    Raises:
        PartitionError: there is none, or none was found within the limit (`is_proven` is false then).
    """
    found = milp.solve(tab, 0.4 * limit_s, aim="excess")
    if found.assigned is not None and is_within(tab, found.assigned):
        return found.assigned
    if math.isfinite(tab.most_cost):
        cheapest = milp.solve(tab, 0.4 * limit_s, aim="disruption")
        if cheapest.assigned is not None:
            if is_within(tab, cheapest.assigned):
                return cheapest.assigned
            least = cheapest.value if cheapest.is_proven else max(cheapest.bound, 0.0)
            excess, proven = least - tab.most_cost, cheapest.is_proven
            if not proven and excess <= 0:
                excess = cheapest.value - tab.most_cost
            raise PartitionError(
                "disruption",
                excess,
                f"disruption: keeping the other bounds costs {'at least' if proven else 'as far as found'} "
                f"{excess + tab.most_cost:.6g}, {tab.most_cost:.6g} is allowed: {excess:.6g} too much",
                is_proven=proven,
            )
        # Even without the disruption bound the pieces do not fit: say which of the other bounds it is.
        found = milp.solve(_without_cost(tab), 0.2 * limit_s, aim="excess")
    raise _misfit(problem, tab, found)


def _without_cost(tab: Tables) -> Tables:
    import dataclasses

    return dataclasses.replace(tab, most_cost=math.inf)


def _misfit(problem: Problem, tab: Tables, found: milp.Solved) -> PartitionError:
    """The error of models that fit in sum but not in pieces."""
    count = tab.clusters
    mean_rate = sum(m.rate_rps for m in problem.models) / count
    mean_static = sum(m.static_bytes for m in problem.models) / count or 1.0
    by_rate, by_memory = found.excess
    is_proven = found.is_proven
    if not math.isfinite(by_rate):
        return PartitionError(
            "memory_bytes" if math.isfinite(tab.most_memory) else "rate_rps",
            0.0,
            f"no division of {len(tab.rate)} models over {count} sub-clusters was found within the limit",
            is_proven=False,
        )
    bound, excess, most, unit = "rate_rps", by_rate * mean_rate, problem.bounds.rate_rps, "requests/s"
    if by_memory > by_rate:
        bound, excess = "memory_bytes", by_memory * mean_static
        most, unit = problem.bounds.memory_bytes, "bytes"
    how = "every division has" if is_proven else "the best division found within the limit has"
    return PartitionError(
        bound,
        excess,
        f"{bound}: {how} a sub-cluster with {most + excess:.6g} {unit}, it may have {most:.6g}: "
        f"{excess:.6g} too much",
        is_proven=is_proven,
    )

"""Many models on shared replicas: the problem of dividing them over sub-clusters, and its answer. Pure.

Every replica of a sub-cluster holds all models of that sub-cluster, so its memory bounds them, and its part
of the scheduler bounds their requests (Symphony, section 4.4 and appendix A). `keystage.batching.partition`
solves what is stated here; nothing here searches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


class PartitionError(Exception):
    """No division meets a bound; names the bound, its value and by how much it is missed.

    Attributes:
        bound: `rate_rps`, `memory_bytes` or `disruption`.
        excess: by how much it is missed at least, in the bound's unit.
        is_proven: whether no division can meet it, or none was found within the time limit.
    """

    def __init__(self, bound: str, excess: float, text: str, *, is_proven: bool = True) -> None:
        super().__init__(text)
        self.bound = bound
        self.excess = excess
        self.is_proven = is_proven


@dataclasses.dataclass(frozen=True, slots=True)
class SharedModel:
    """What a model needs of its sub-cluster.

    Attributes:
        name: for messages.
        rate_rps: requests a second, r_i.
        static_bytes: its parameters, on every replica of the sub-cluster, s_i.
        dynamic_bytes: what a running batch takes beside them; one batch runs at a time, d_i.
    """

    name: str
    rate_rps: float
    static_bytes: float
    dynamic_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What a division must keep.

    Attributes:
        sub_clusters: how many there are, l.
        rate_rps: most requests a second in one sub-cluster, R_max.
        memory_bytes: memory of a replica, S_max: static of all plus the largest dynamic.
        disruption: most that loading and unloading may cost, C_max; only with a current division.
    """

    sub_clusters: int
    rate_rps: float = math.inf
    memory_bytes: float = math.inf
    disruption: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Models, bounds and what is there now.

    Attributes:
        models: at least one.
        bounds: as above.
        weight: w of the objective dR / mean R + w * dS / mean S (both made free of units by their means).
        current: each model's sub-cluster now, -1 for a new one; None when nothing runs yet.
        costs: c_ij, cost of loading or of unloading model i at sub-cluster j; None: 1 everywhere. A model
            that moves is unloaded at one and loaded at the other: both count.
    """

    models: Sequence[SharedModel]
    bounds: Bounds
    weight: float = 1.0
    current: Sequence[int] | None = None
    costs: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        count, clusters = len(self.models), self.bounds.sub_clusters
        if count < 1:
            raise ValueError("there must be at least one model, there is none")
        if clusters < 1:
            raise ValueError(f"sub_clusters must be at least 1, it is {clusters}")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight must be at least 0 and finite, it is {self.weight}")
        for bound in ("rate_rps", "memory_bytes", "disruption"):
            if not getattr(self.bounds, bound) >= 0:
                raise ValueError(f"{bound} must be at least 0, it is {getattr(self.bounds, bound)}")
        for model in self.models:
            _check_model(model)
        self._check_current(count, clusters)

    def _check_current(self, count: int, clusters: int) -> None:
        """The present division and the costs of leaving it."""
        if self.current is not None:
            if len(self.current) != count:
                raise ValueError(f"current must name {count} sub-clusters, it names {len(self.current)}")
            wrong = next((j for j in self.current if not -1 <= j < clusters), None)
            if wrong is not None:
                raise ValueError(f"current names sub-cluster {wrong}, there are {clusters}")
        elif math.isfinite(self.bounds.disruption):
            raise ValueError("a disruption bound needs the current division")
        if self.costs is not None and (
            len(self.costs) != count or any(len(row) != clusters for row in self.costs)
        ):
            raise ValueError(f"costs must have {count} rows of {clusters}")


def _check_model(model: SharedModel) -> None:
    for name in ("rate_rps", "static_bytes", "dynamic_bytes"):
        value = getattr(model, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} of {model.name} must be at least 0 and finite, it is {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """An answer.

    Attributes:
        assigned: each model's sub-cluster.
        status: `optimal`: proven; `gap`: no better one could differ by more than the asked gap; `time limit`.
        objective: dR / mean R + w * dS / mean S.
        bound: no division has a smaller objective than this.
        rate_imbalance_ratio: (max - min) / mean of the sub-clusters' requests a second.
        memory_imbalance_ratio: the same of their static memory.
        disruption: cost of going there from the current division.
        moved: models that change their sub-cluster (new ones are not counted).
    """

    assigned: tuple[int, ...]
    status: str
    objective: float
    bound: float
    rate_imbalance_ratio: float
    memory_imbalance_ratio: float
    disruption: float
    moved: int


def imbalance_ratio(totals: Sequence[float]) -> float:
    """(max - min) / mean, 0 where all are 0 (Symphony, appendix A.2)."""
    mean = sum(totals) / len(totals)
    return (max(totals) - min(totals)) / mean if mean > 0 else 0.0


def totals(problem: Problem, assigned: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Requests a second, static bytes and largest dynamic bytes of every sub-cluster."""
    count = problem.bounds.sub_clusters
    rates, memories, dynamics = [0.0] * count, [0.0] * count, [0.0] * count
    for model, j in zip(problem.models, assigned, strict=True):
        rates[j] += model.rate_rps
        memories[j] += model.static_bytes
        dynamics[j] = max(dynamics[j], model.dynamic_bytes)
    return rates, memories, dynamics


def objective(problem: Problem, assigned: Sequence[int]) -> float:
    """Appendix A, (3), with both deviations divided by their means."""
    rates, memories, _ = totals(problem, assigned)
    return _deviation(rates) + problem.weight * _deviation(memories)


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean > 0 else 0.0


def disruption(problem: Problem, assigned: Sequence[int]) -> float:
    """Appendix A, left side of (10)."""
    if problem.current is None:
        return 0.0
    cost = 0.0
    for i, (old, new) in enumerate(zip(problem.current, assigned, strict=True)):
        if old != new:
            cost += _cost(problem, i, new) + (_cost(problem, i, old) if old >= 0 else 0.0)
    return cost


def _cost(problem: Problem, i: int, j: int) -> float:
    return 1.0 if problem.costs is None else problem.costs[i][j]


ROUNDING = 1e-9
"""A bound may be missed by so much of itself: sums of floats are not exact."""


def violations(problem: Problem, assigned: Sequence[int]) -> dict[str, float]:
    """By how much bounds are missed, in their units; empty when all are kept."""
    rates, memories, dynamics = totals(problem, assigned)
    bounds = problem.bounds
    found = {
        "rate_rps": max(rates) - bounds.rate_rps,
        "memory_bytes": max(s + d for s, d in zip(memories, dynamics, strict=True)) - bounds.memory_bytes,
        "disruption": disruption(problem, assigned) - bounds.disruption,
    }
    return {name: by for name, by in found.items() if by > ROUNDING * (getattr(bounds, name) or 1.0)}


def division(problem: Problem, assigned: Sequence[int], status: str, bound: float) -> Division:
    """The answer with its figures."""
    rates, memories, _ = totals(problem, assigned)
    before = problem.current if problem.current is not None else [-1] * len(assigned)
    value = objective(problem, assigned)
    return Division(
        assigned=tuple(assigned),
        status=status,
        objective=value,
        bound=min(bound, value),
        rate_imbalance_ratio=imbalance_ratio(rates),
        memory_imbalance_ratio=imbalance_ratio(memories),
        disruption=disruption(problem, assigned),
        moved=sum(old not in (-1, new) for old, new in zip(before, assigned, strict=True)),
    )

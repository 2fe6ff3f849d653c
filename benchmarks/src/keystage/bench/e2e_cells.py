"""Cells of `keystage bench e2e`, and the best static allocation of one.

Before it: `whole_models`, `whole_world`, `whole_twin`. After it: `e2e` runs all cells. A cell is a CV and a
seed; policies of a cell meet the same arrivals. Model: BERT-21B of QUART's Table 1 (137 ms stand-alone) in
four stages. Seeds from 300 on are used nowhere else (the policy's defaults were developed on 0 to 4, rivals
tuned on 9000 and up).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from keystage.bench.paper_arrivals import achieved_cv, bursty
from keystage.bench.paper_cells import CV_SLO
from keystage.bench.paper_models import BERT, MODELS
from keystage.bench.paper_policies import OURS, RIVALS, STATIC, Traffic
from keystage.bench.sim_vs_local import Profile
from keystage.bench.steered import Order
from keystage.bench.tuning_chosen import chosen
from keystage.bench.whole_client import Floats
from keystage.bench.whole_models import STAGES, Part, one_each_rps, parts
from keystage.bench.whole_twin import twin
from keystage.bench.whole_world import Plan, Served
from keystage.simulator import api
from keystage.simulator.run import simulate

OFF = "off"
POLICIES = (OURS, OFF, *RIVALS, STATIC)
MODEL = BERT
LOAD = 2.0
"""Mean rate over what one replica of each stage serves without batches: bursts of CV 8 then ask for a few
dozen replicas, which two cores can start and feed."""
POOL = 24
"""GPUs of the emulated pool (R_total): the most stage processes at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load.

    Attributes:
        cv: CV of the gaps.
        seed: of the arrivals.
        duration_s: length of the schedule.
    """

    cv: float
    seed: int
    duration_s: float

    @property
    def rate_rps(self) -> float:
        """Mean rate, exactly."""
        return LOAD * one_each_rps(MODEL)

    @property
    def deadline_s(self) -> float:
        """Objective that policies are told and goodput is counted by."""
        return CV_SLO * MODEL.exec_s

    def times_s(self) -> Floats:
        """Arrivals."""
        count = round(self.rate_rps * self.duration_s)
        return bursty(self.rate_rps, self.cv, count, MODELS.index(MODEL), self.seed)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        cvs: CVs.
        seeds: seeds of each.
        duration_s: of a cell.
        policies: who steers, Keystage first.
    """

    cvs: tuple[float, ...]
    seeds: tuple[int, ...]
    duration_s: float
    policies: tuple[str, ...] = POLICIES

    def cells(self) -> list[Cell]:
        """All cells."""
        return [Cell(cv, seed, self.duration_s) for cv in self.cvs for seed in self.seeds]


QUICK = Size((4.0,), (310,), 12.0, (OURS, OFF))
SHORT = Size((1.0, 4.0, 8.0), (300,), 60.0)
FULL = Size((0.1, 1.0, 2.0, 4.0, 8.0), (300, 301, 302), 60.0)


def served(cell: Cell, policy: str, allocation: Sequence[int] = ()) -> Served:
    """The pipeline as a policy gets it.

    Args:
        cell: the load.
        policy: INFless gets whole models, at first as many instances as fill the GPUs of one replica of each
            stage; the others get stages, one replica each.
        allocation: replicas of `off`.
    """
    is_whole = policy == "infless"
    functions = parts(MODEL, whole=is_whole)
    replicas = (math.ceil(STAGES / functions[0].gpus),) if is_whole else (1,) * STAGES
    return Served(
        "whole" if is_whole else "staged",
        functions,
        cell.times_s(),
        cell.deadline_s,
        tuple(allocation) or replicas,
    )


def order(cell: Cell, policy: str) -> Order | None:
    """Who steers; nobody for `off`."""
    if policy == OFF:
        return None
    effort, values = chosen(policy)
    name = served(cell, policy).name
    traffic = [Traffic(name, cell.rate_rps, achieved_cv(cell.times_s()))] if policy == STATIC else []
    return Order(policy=policy, effort=effort, changes=dict(values), traffic=traffic, budget_replicas=POOL)


def plan(cell: Cell, policy: str, allocation: Sequence[int] = ()) -> Plan:
    """A cell on the real platform; requests go straight to the router."""
    return Plan((served(cell, policy, allocation),), cell.duration_s, order(cell, policy), POOL)


# ---------------------------------------------------------------- the best static allocation


def best_static(cell: Cell, gpus: float, profile: Profile) -> tuple[int, ...]:
    """Replicas by stage: the best that simulation finds for these very arrivals, with equal replica-seconds.

    Args:
        cell: the load.
        gpus: time-averaged replicas of Keystage's run; rounded up to whole ones, to the baseline's favour.
        profile: what hand-offs take.
    """
    total = max(STAGES, math.ceil(gpus - 1e-9))
    one = served(cell, OFF)

    @functools.cache
    def mean_s(replicas: tuple[int, ...]) -> float:
        world = twin([dataclasses.replace(one, replicas=replicas)], profile, api.LoadSpec(), POOL)
        found = simulate(world, None, cell.seed)
        latency_s = found.pipelines[0].latency_s[found.pipelines[0].arrived_s >= world.warm_s]
        unserved_s = found.ended_s
        return float(np.where(np.isfinite(latency_s), latency_s, unserved_s).mean())

    return climb(proportional(one.parts, total), mean_s)


def proportional(functions: Sequence[Part], total: int) -> tuple[int, ...]:
    """`total` replicas by service times, at least one each: where the search begins."""
    counts = [1] * len(functions)
    for _ in range(total - len(functions)):
        busiest = max(range(len(counts)), key=lambda k: (functions[k].item_s / counts[k], -k))
        counts[busiest] += 1
    return tuple(counts)


def climb(begin: tuple[int, ...], cost: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """Moves one replica at a time from a stage to another while that lowers the cost; every stage keeps one.

    Args:
        begin: replicas by stage.
        cost: what is to be low.

    Returns:
        An allocation that no single move betters.
    """
    best, best_cost = begin, cost(begin)
    while True:
        moves = []
        for source in range(len(best)):
            for to in range(len(best)):
                if source != to and best[source] > 1:
                    counts = list(best)
                    counts[source] -= 1
                    counts[to] += 1
                    moves.append(tuple(counts))
        found = min(moves, key=lambda counts: (cost(counts), counts), default=best)
        if cost(found) >= best_cost:
            return best
        best, best_cost = found, cost(found)

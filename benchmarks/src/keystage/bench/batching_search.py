"""Goodput of one system on one set-up and seed, as work that a pool of processes can share. Pure but for CPU.

Before: `batching_table` and `batching_sweep`, which say what to measure. After: `batching_cluster.goodput`.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from keystage.batching.api import Scheduler
from keystage.bench import batching_systems
from keystage.bench.batching_arrivals import Arrivals, arrivals, gamma
from keystage.bench.batching_cluster import RunLength, goodput
from keystage.bench.batching_models import Model, capacity_rps


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """What to search.

    Attributes:
        system: one of `batching_systems.SYSTEMS`.
        models: served, equally popular.
        replicas: emulated GPUs.
        shape: of the gamma law of gaps, 1 is Poisson.
        seed: of the arrivals.
        length: of a run.
        tolerance_ratio: of the search.
        pooled: the models are exchangeable, see `goodput`.
        knob: of the system, None: its default.
        guess_rps: where to begin.
    """

    system: str
    models: tuple[Model, ...]
    replicas: int
    shape: float
    seed: int
    length: RunLength
    tolerance_ratio: float
    pooled: bool = False
    knob: float | None = None
    guess_rps: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """What was found; the figures beside the rate are of the best run that held, of its first model.

    Attributes:
        rate_rps: the highest rate that held.
        requests: offered in that run.
        median_batch: half the requests ran in batches at least this large.
        queueing_s: median and 99th percentile from arrival to the start of the batch.
        worst_bad_ratio: of the model that had most.
        idle_ratio: of the replicas.
        probes: runs of the search.
    """

    rate_rps: float
    requests: int
    median_batch: int
    queueing_s: tuple[float, float]
    worst_bad_ratio: float
    idle_ratio: float
    probes: int


def search(wanted: Search) -> Goodput:
    """Runs one search."""
    models = wanted.models
    shares = [1 / len(models)] * len(models)

    def make(rate_rps: float) -> Scheduler:
        return batching_systems.make(wanted.system, models, shares, rate_rps, wanted.knob)

    found = goodput(
        make,
        models,
        functools.partial(_arrivals, len(models), wanted.shape),
        wanted.replicas,
        most_rps=capacity_rps(models, shares, wanted.replicas),
        guess_rps=wanted.guess_rps,
        length=wanted.length,
        seed=wanted.seed,
        tolerance_ratio=wanted.tolerance_ratio,
        pooled=wanted.pooled,
    )
    served = found.served
    if served is None:
        return Goodput(0.0, 0, 0, (0.0, 0.0), 1.0, 0.0, found.probes)
    middle, tail = np.percentile(served.queueing_s[0], [50, 99])
    return Goodput(
        rate_rps=found.rate_rps,
        requests=int(served.offered.sum()),
        median_batch=served.median_batch(0),
        queueing_s=(float(middle), float(tail)),
        worst_bad_ratio=served.worst_bad_ratio,
        idle_ratio=served.idle_ratio,
        probes=found.probes,
    )


def _arrivals(models: int, shape: float, rate_rps: float, seconds: float, seed: int) -> Arrivals:
    return arrivals([rate_rps / models] * models, seconds, seed, gamma(shape))


def search_all(wanted: Iterable[Search]) -> Iterator[Goodput]:
    """All of them in order, as many at a time as there are cores."""
    searches = list(wanted)
    processes = min(os.cpu_count() or 1, len(searches))
    if processes < 2:
        yield from map(search, searches)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(search, searches)

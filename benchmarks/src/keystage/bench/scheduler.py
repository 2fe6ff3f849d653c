"""`keystage bench scheduler`: events a second of the batch scheduler alone, over models and replicas.

Before it: nothing. After it: the frame reports. A world of equally popular models with Poisson arrivals and
emulated replicas is run once to write down what happens (arrivals, ends of batches, timers); then a new
scheduler of the same kind is told the same, timed, on one core. An *event* is one such call, with the
question for the next timer and the taking of orders that follow each. The scheduler is deterministic, so it
orders the same batches again. The load is a fixed part of what staggered batches could serve.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from keystage.batching.api import Dispatch, Request
from keystage.batching.deferred import Deferred
from keystage.batching.profile import LatencyProfile
from keystage.batching.scheduler import CentralScheduler
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.results_page import write_page

PROFILE = LatencyProfile(alpha_s=1.053e-3, beta_s=5.072e-3)
"""ResNet50 on a 1080Ti (Symphony, Table 2)."""

SLO_S = 0.1
"""As in Symphony's scalability measurements (section 5.5)."""

LOAD_RATIO = 0.8
MODELS = (10, 100, 1000)
REPLICAS = (8, 64, 512, 4096)
HERE = (100, 64)
ROUNDS = 5
LIKE_IT = 20_000
"""Arrivals of a run, at the smallest."""

_ARRIVE, _FINISHED, _TIMER = range(3)
_Script: TypeAlias = list[tuple[int, int, float]]


def run(*, quick: bool) -> BenchResult:
    """Times the scheduler at every size, in rounds over all sizes."""
    sizes = list(itertools.product(MODELS, REPLICAS))
    scripts = {size: record(*size, arrivals=_arrivals(*size, quick=quick)) for size in sizes}
    seconds: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    for _ in range(2 if quick else ROUNDS):
        for size in sizes:
            seconds[size].append(replay(*size, scripts[size]) / len(scripts[size]))
    rows: list[dict[str, object]] = []
    for models, replicas in sizes:
        script = scripts[models, replicas]
        median_s = float(np.median(seconds[models, replicas]))
        kinds = np.bincount([kind for kind, _, _ in script], minlength=3)
        rows.append(
            {
                "models": models,
                "replicas": replicas,
                "us an event": 1e6 * median_s,
                "events a second": round(1 / median_s),
                "arrivals": int(kinds[_ARRIVE]),
                "batches": int(kinds[_FINISHED]),
                "timers": int(kinds[_TIMER]),
            }
        )
    exponents = [
        _exponent(sizes, [taken[i] for taken in seconds.values()]) for i in range(len(seconds[HERE]))
    ]
    figures = {
        "events_per_s_m100_g64": Figure(
            [1 / taken_s for taken_s in seconds[HERE]],
            "events a second on one core, 100 models on 64 replicas",
            ">= 50000",
        ),
        "growth_exponent": Figure(
            exponents,
            "time of an event as models^a replicas^b, the larger of a and b",
            "<= 0.15",
            max_spread_ratio=math.inf,
        ),
    }
    notes = [
        f"Poisson arrivals at {LOAD_RATIO:.0%} of what staggered batches could serve, SLO {SLO_S * 1e3:g} ms",
        "with more models on as many replicas batches are smaller: more of the events are ends and timers",
    ]
    result = BenchResult(rows, figures, notes)
    if not quick:
        write_page("scheduler", "The batch scheduler alone, measured", result)
    return result


def record(models: int, replicas: int, *, arrivals: int, seed: int = 1) -> _Script:
    """What happens to a scheduler in such a world: (kind, request or replica, time).

    Args:
        models: how many, equally popular.
        replicas: how many, each with all models.
        arrivals: of all models together; the script ends with the last one.
        seed: of the arrivals.
    """
    script: _Script = []
    scheduler = _made(models, replicas)
    requests = _requests(models, replicas, arrivals, seed)
    ends: list[tuple[float, int]] = []
    position = 0
    while position < len(requests):
        came_s = requests[position].arrived_s
        timer_s, end_s = scheduler.next_timer_s(), ends[0][0] if ends else math.inf
        if end_s <= min(came_s, timer_s):
            _, replica = heapq.heappop(ends)
            script.append((_FINISHED, replica, end_s))
            scheduler.finished(replica, end_s)
            now_s = end_s
        elif came_s <= timer_s:
            script.append((_ARRIVE, position, came_s))
            scheduler.arrive(requests[position], came_s)
            position += 1
            now_s = came_s
        else:
            script.append((_TIMER, 0, timer_s))
            scheduler.on_timer(timer_s)
            now_s = timer_s
        for order in scheduler.take():
            if isinstance(order, Dispatch):
                end_s = max(now_s, order.start_s) + PROFILE.latency_s(len(order.requests))
                heapq.heappush(ends, (end_s, order.replica))
    return script


def replay(models: int, replicas: int, script: _Script, *, seed: int = 1) -> float:
    """Seconds that a new scheduler takes for it; garbage is collected before, not in between."""
    scheduler = _made(models, replicas)
    requests = _requests(models, replicas, sum(kind == _ARRIVE for kind, _, _ in script), seed)
    arrive, finished, on_timer = scheduler.arrive, scheduler.finished, scheduler.on_timer
    next_timer_s, take = scheduler.next_timer_s, scheduler.take
    gc.collect()
    gc.disable()
    began_s = time.perf_counter()
    for kind, what, now_s in script:
        if kind == _ARRIVE:
            arrive(requests[what], now_s)
        elif kind == _FINISHED:
            finished(what, now_s)
        else:
            on_timer(now_s)
        take()
        next_timer_s()
    taken_s = time.perf_counter() - began_s
    gc.enable()
    return taken_s


def _made(models: int, replicas: int) -> CentralScheduler:
    policy = Deferred()
    scheduler = CentralScheduler([(PROFILE, policy)] * models)
    for replica in range(replicas):
        scheduler.add_replica(replica, range(models), 0.0)
    return scheduler


def _arrivals(models: int, replicas: int, *, quick: bool) -> int:
    """So many that every replica gets some batches and every model some requests."""
    return max(
        LIKE_IT // (4 if quick else 1), (20 if quick else 100) * replicas, (10 if quick else 30) * models
    )


def _requests(models: int, replicas: int, count: int, seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    batch = PROFILE.largest_batch(SLO_S * replicas / (replicas + 1))
    rate_rps = LOAD_RATIO * replicas * batch / PROFILE.latency_s(batch)
    times_s = np.cumsum(random.exponential(1 / rate_rps, count)).tolist()
    whose = random.integers(0, models, count).tolist()
    return [Request(i, whose[i], times_s[i], times_s[i] + SLO_S) for i in range(count)]


def _exponent(sizes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> float:
    """The larger exponent of seconds = c models^a replicas^b, by least squares of logarithms."""
    table = np.array([(1.0, math.log(models), math.log(replicas)) for models, replicas in sizes])
    found = np.linalg.lstsq(table, np.log(seconds), rcond=None)[0]
    return float(max(found[1], found[2]))

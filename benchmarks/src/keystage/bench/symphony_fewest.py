"""Symphony 5.2: the fewest GPUs that serve 15,000 requests a second, each model within its objective.

Before it: `symphony`. After it: rows. A number of GPUs holds when no model has more than 1 % bad requests;
the search grows until one holds and halves between. A system that holds with no number up to `MOST` has none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from keystage.bench import batching_arrivals as laws
from keystage.bench.batching_cluster import MAX_BAD_RATIO, RunLength, serve
from keystage.bench.batching_models import Model, capacity_rps, named
from keystage.bench.symphony_goodput import zoo
from keystage.bench.symphony_systems import system

RATE_RPS = 15_000.0
MOST = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One search: scheduler, models, seed of the arrivals, requests of a model a run has at least."""

    name: str
    models: Sequence[Model]
    seed: int
    each: int
    tag: str


def single() -> list[Model]:
    """ResNet50 on an A100 within 25 ms."""
    return [dataclasses.replace(named("A100", "ResNet50"), slo_s=0.025)]


def mixed() -> list[Model]:
    """All of Table 4."""
    return zoo("A100", "mixed")


def fewest(asked: Asked) -> int | None:
    """GPUs, None when not even `MOST` do."""
    models, count = list(asked.models), len(asked.models)
    shares = [1 / count] * count
    least = 1
    while capacity_rps(models, shares, least) < RATE_RPS:
        least += 1
    low, high = least - 1, 0
    guess = max(1, round(1.2 * least))
    while not high:
        if _holds(asked, models, shares, guess):
            high = guess
        elif guess >= MOST:
            return None
        else:
            low, guess = guess, min(MOST, round(1.5 * guess) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(asked, models, shares, middle) else (middle, high)
    return high


def _holds(asked: Asked, models: list[Model], shares: list[float], replicas: int) -> bool:
    """Whether every model is within its objective with so many."""
    warm_s, seconds = RunLength(each=asked.each, requests=20 * asked.each).window(
        models, RATE_RPS, min(shares)
    )
    served = serve(
        functools.partial(system(asked.name, models, shares), RATE_RPS),
        models,
        laws.arrivals([RATE_RPS * share for share in shares], seconds, asked.seed),
        replicas,
        seconds=seconds,
        warm_s=warm_s,
        give_up_ratio=MAX_BAD_RATIO,
    )
    return not served.stopped

"""Symphony 5.1 and 5.3: goodput of all schedulers in mixed settings, and over SLO, popularity and arrivals.

Before it: `symphony`, which runs `Cell`s side by side. After it: rows and ratios. A cell is one search for
one system; everything about it is in the record, so a cell can run in another process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.bench import batching_arrivals as laws
from keystage.bench.batching_cluster import RunLength, goodput
from keystage.bench.batching_models import GPUS, TABLE_2, Model, capacity_rps
from keystage.bench.symphony_systems import system

SETS = ("mixed", "strong", "weak")
STRONG = 2.0
"""beta / alpha above which a model's batching effect is strong (section 5.1)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One search.

    Attributes:
        name: scheduler.
        models: served.
        replicas: emulated GPUs.
        zipf: exponent of popularity, 0 for equal.
        shape: of gamma gaps, 1 for Poisson.
        seed: of the arrivals.
        each: requests of the rarest model a run has at least.
        tag: what the cell stands for, in words.
    """

    name: str
    models: Sequence[Model]
    replicas: int
    zipf: float
    shape: float
    seed: int
    each: int
    tag: str


def zoo(gpu: str, kind: str) -> list[Model]:
    """Models of Table 3 or 4: all, those of strong, or those of weak batching effect."""
    models = GPUS[gpu]
    if kind == "mixed":
        return list(models)
    is_strong = kind == "strong"
    return [m for m in models if (m.profile.beta_s / m.profile.alpha_s > STRONG) == is_strong]


def resnets(slo_s: float, count: int = 20) -> list[Model]:
    """Specialised variants of one ResNet50 (Table 2), all of one objective (section 5.3)."""
    return [dataclasses.replace(TABLE_2[0].model, name=f"ResNet50-{i}", slo_s=slo_s) for i in range(count)]


def search(cell: Cell) -> float:
    """Goodput of a cell, requests/s."""
    models, count = list(cell.models), len(cell.models)
    shares = laws.shares(count, cell.zipf).tolist()
    gaps = laws.gamma(cell.shape)
    # Models that are alike in all are judged together; the 1 / shape requests of a burst are one event.
    alike = cell.zipf == 0 and len({(m.profile, m.slo_s) for m in models}) == 1
    bursts = 1 / cell.shape
    found = goodput(
        system(cell.name, models, shares),
        models,
        lambda rate, seconds, seed: laws.arrivals([rate * share for share in shares], seconds, seed, gaps),
        cell.replicas,
        most_rps=capacity_rps(models, shares, cell.replicas),
        length=RunLength(requests=int(20 * cell.each * max(1.0, bursts / 5)), each=cell.each, slos=10.0),
        seed=cell.seed,
        rarest=min(shares),
        pooled=alike,
        tolerance_ratio=0.01,
    )
    return found.rate_rps

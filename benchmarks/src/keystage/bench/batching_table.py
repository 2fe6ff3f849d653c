"""Table 2 of Symphony remade: two models, each alone on eight GPUs, under every system.

Before: `batching.run`. After: rows for the page. Every system is tuned alike: where it has a knob, each value
is searched on arrivals that are not measured, and the best is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keystage.bench.batching_cluster import RunLength
from keystage.bench.batching_models import TABLE_2, Measured, staggered, uncoordinated
from keystage.bench.batching_search import Goodput, Search, search_all
from keystage.bench.batching_systems import SYSTEMS, TUNED

TUNING_SEED = 1_000
"""Arrivals that knobs are tuned on; the measured ones have seeds from 0 on."""

PAPER_NAMES = {
    "deferred": "symphony",
    "algorithm-1": "symphony",
    "clockwork": "clockwork",
    "nexus": "nexus",
    "shepherd": "shepherd",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TableEffort:
    """How much of it.

    Attributes:
        seeds: arrivals a system is measured on, each a sample.
        requests: in the window of every run.
        tolerance_ratio: of every search.
    """

    seeds: int
    requests: int
    tolerance_ratio: float


@dataclasses.dataclass(frozen=True, slots=True)
class TableRow:
    """A system on a model.

    Attributes:
        measured: the paper's row.
        system: as in `SYSTEMS`.
        knob: the best of `TUNED`, None where there is none.
        found: by seed.
    """

    measured: Measured
    system: str
    knob: float | None
    found: Sequence[Goodput]

    @property
    def rates_rps(self) -> list[float]:
        """Goodput by seed."""
        return [goodput.rate_rps for goodput in self.found]


def measure(effort: TableEffort) -> list[TableRow]:
    """All systems on both models."""
    knobs = _tuned(effort)
    keys = [(row, system) for row in TABLE_2 for system in SYSTEMS]
    wanted = [
        _search(row, system, seed, effort, knobs.get((row.model.name, system)))
        for row, system in keys
        for seed in range(effort.seeds)
    ]
    found = list(search_all(wanted))
    return [
        TableRow(
            row, system, knobs.get((row.model.name, system)), found[k * effort.seeds : (k + 1) * effort.seeds]
        )
        for k, (row, system) in enumerate(keys)
    ]


def _tuned(effort: TableEffort) -> Mapping[tuple[str, str], float]:
    """The best value of each knob, by model and system."""
    keys = [(row, system, knob) for row in TABLE_2 for system, knobs in TUNED.items() for knob in knobs]
    short = dataclasses.replace(effort, requests=effort.requests // 2)
    found = search_all([_search(row, system, TUNING_SEED, short, knob) for row, system, knob in keys])
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for (row, system, knob), goodput in zip(keys, found, strict=True):
        key = (row.model.name, system)
        best[key] = max(best.get(key, (0.0, knob)), (goodput.rate_rps, knob), key=lambda pair: pair[0])
    return {key: knob for key, (_, knob) in best.items()}


def _search(row: Measured, system: str, seed: int, effort: TableEffort, knob: float | None) -> Search:
    return Search(
        system=system,
        models=(row.model,),
        replicas=row.replicas,
        shape=1.0,
        seed=seed,
        length=RunLength(requests=effort.requests),
        tolerance_ratio=effort.tolerance_ratio,
        knob=knob,
        guess_rps=0.9 * row.staggered_rps,
    )


def shown(row: TableRow) -> dict[str, Any]:
    """One row of the page."""
    rates = row.rates_rps
    name = PAPER_NAMES.get(row.system, "")
    bound_rps = staggered(row.measured.model, row.measured.replicas)[1]
    middle = row.found[len(row.found) // 2]
    low, high = np.percentile(rates, [25, 75])
    return {
        "model": row.measured.model.name,
        "system": row.system + ("" if row.knob is None else f" ({row.knob:g})"),
        "goodput r/s": round(float(np.median(rates)), 1),
        "quartiles": f"{low:.1f} .. {high:.1f}",
        "of staggered": round(float(np.median(rates)) / bound_rps, 4),
        "paper's r/s": row.measured.goodput_rps.get(name, ""),
        "median batch": middle.median_batch,
        "paper's batch": row.measured.median_batch.get(name, ""),
        "queueing ms, median": round(1000 * middle.queueing_s[0], 2),
        "queueing ms, p99": round(1000 * middle.queueing_s[1], 2),
    }


def bounds() -> list[str]:
    """The analytic bounds, in words, one sentence a model."""
    lines = []
    for row in TABLE_2:
        alone, together = uncoordinated(row.model, row.replicas), staggered(row.model, row.replicas)
        lines.append(
            f"{row.model.name}, {1000 * row.model.slo_s:g} ms, {row.replicas} GPUs: without coordination "
            f"batches of {alone[0]} and {alone[1]:.0f} r/s, staggered {together[0]} and {together[1]:.0f} r/s"
        )
    return lines

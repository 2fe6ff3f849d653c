"""Deferred against eager over Symphony's synthetic workloads (Figure 7): the ratio of goodputs, cell by cell.

Before: `batching_cells`. After: `batching.run`. Both run on the same arrivals. A first look at one seed finds
the cells that need a second one: where deferred is not clearly ahead, both are measured anew on several other
seeds over longer runs, and that alone counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keystage.bench.batching_cells import MIXED, SLOS_A_RUN, Cell
from keystage.bench.batching_cluster import RunLength
from keystage.bench.batching_search import Search, search_all

LOW_RATIO = 0.95
"""Symphony: in almost all cells deferred has more than this share of eager's goodput."""

FLOOR_RATIO = 0.90

CLOSE_RATIO = 0.98
"""A first look below this is no result: the cell is measured anew."""

SQUARED_CVS = 2_000
"""Arrivals of a run over the squared coefficient of variation of their gaps, at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepEffort:
    """How much of it.

    Attributes:
        requests: in the window of a first look's runs, at least.
        tolerance_ratio: of a first look's searches.
        again: seeds of a second look; 0 for none.
        again_requests: in the window of its runs, at least.
    """

    requests: int
    tolerance_ratio: float
    again: int
    again_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class CellResult:
    """A cell, measured.

    Attributes:
        cell: which.
        deferred_rps: goodput by seed.
        eager_rps: of the same seeds.
        is_again: measured in a second look.
    """

    cell: Cell
    deferred_rps: Sequence[float]
    eager_rps: Sequence[float]
    is_again: bool

    @property
    def ratios(self) -> list[float]:
        """Deferred over eager by seed; 1 where neither holds any rate."""
        pairs = zip(self.deferred_rps, self.eager_rps, strict=True)
        return [ours / theirs if theirs else (1.0 if not ours else float("inf")) for ours, theirs in pairs]

    @property
    def ratio(self) -> float:
        """Their median."""
        return float(np.median(self.ratios))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Their first and third quartile."""
        low, high = np.percentile(self.ratios, [25, 75])
        return float(low), float(high)


def length(cell: Cell, requests: int) -> RunLength:
    """Of a cell's runs.

    In a cell of one model all copies are exchangeable and together give the share of bad requests; in a mixed
    one every model is judged by itself and needs enough of its own.
    """
    least = max(requests, int(SQUARED_CVS / cell.shape))
    each = max(1_000, requests // 10) if cell.name == MIXED else 0
    return RunLength(requests=least, each=each, slos=SLOS_A_RUN)


def measure(cells: Sequence[Cell], effort: SweepEffort) -> list[CellResult]:
    """Every cell, in order."""
    first = _look(cells, effort.requests, effort.tolerance_ratio, [0])
    results = [CellResult(cell, *found, is_again=False) for cell, found in zip(cells, first, strict=True)]
    close = [place for place, result in enumerate(results) if result.ratio < CLOSE_RATIO]
    if not effort.again:
        return results
    seeds = list(range(1, effort.again + 1))
    again = _look([cells[k] for k in close], effort.again_requests, effort.tolerance_ratio / 2, seeds)
    for place, found in zip(close, again, strict=True):
        results[place] = CellResult(cells[place], *found, is_again=True)
    return results


def _look(
    cells: Sequence[Cell], requests: int, tolerance_ratio: float, seeds: Sequence[int]
) -> list[tuple[list[float], list[float]]]:
    """Goodput of deferred and of eager by seed, for each cell."""
    wanted = [
        Search(
            system=system,
            models=cell.models,
            replicas=cell.replicas,
            shape=cell.shape,
            seed=seed,
            length=length(cell, requests),
            tolerance_ratio=tolerance_ratio,
            pooled=cell.name != MIXED,
        )
        for cell in cells
        for system in ("deferred", "eager")
        for seed in seeds
    ]
    rates = [found.rate_rps for found in search_all(wanted)]
    count = len(seeds)
    return [
        (rates[2 * k * count : (2 * k + 1) * count], rates[(2 * k + 1) * count : (2 * k + 2) * count])
        for k in range(len(cells))
    ]


def below(results: Sequence[CellResult], ratio: float) -> list[CellResult]:
    """Cells whose ratio is lower, lowest first."""
    return sorted((result for result in results if result.ratio < ratio), key=lambda result: result.ratio)


def shown(result: CellResult) -> dict[str, Any]:
    """One row of the page."""
    low, high = result.quartiles
    return {
        "cell": str(result.cell),
        "deferred r/s": round(float(np.median(result.deferred_rps)), 1),
        "eager r/s": round(float(np.median(result.eager_rps)), 1),
        "deferred / eager": round(result.ratio, 4),
        "quartiles": f"{low:.4f} .. {high:.4f}",
        "seeds": len(result.ratios),
    }


def distribution(results: Sequence[CellResult]) -> dict[str, dict[str, float]]:
    """Percentiles of deferred / eager, over all cells and over each model's."""
    groups: dict[str, list[float]] = {"all": [result.ratio for result in results]}
    for result in results:
        groups.setdefault(f"{result.cell.gpu} {result.cell.name}", []).append(result.ratio)
    return {
        name: {
            "cells": len(ratios),
            "least": round(min(ratios), 4),
            **{f"p{at}": round(float(np.percentile(ratios, at)), 4) for at in (10, 25, 50, 75, 90)},
            "most": round(max(ratios), 4),
        }
        for name, ratios in groups.items()
    }

"""`keystage bench batching`: goodput of our scheduler and its rivals on Symphony's emulated GPUs.

Two parts. Table 2 of the paper: two models, each alone on eight GPUs, under every system, beside the analytic
bounds and the paper's own measurements. Figure 7: deferred against eager over synthetic workloads. All of it
in emulated time with the scheduler that the router runs; `--quick` is a look and goes to the output folder.
"""

from __future__ import annotations

from pathlib import Path

from keystage.bench import batching_report
from keystage.bench.batching_cells import SLOS_A_RUN, every, sample
from keystage.bench.batching_sweep import (
    CLOSE_RATIO,
    FLOOR_RATIO,
    LOW_RATIO,
    SQUARED_CVS,
    CellResult,
    SweepEffort,
    below,
    distribution,
)
from keystage.bench.batching_sweep import measure as measure_cells
from keystage.bench.batching_sweep import shown as shown_cell
from keystage.bench.batching_table import TableEffort, TableRow, bounds
from keystage.bench.batching_table import measure as measure_table
from keystage.bench.batching_table import shown as shown_row
from keystage.bench.frame import BenchResult, Figure, document

CELLS, QUICK_CELLS = 60, 6
SAMPLE_SEED = 0
MOST_QUICK_RPS = 60_000
"""A quick look leaves out cells whose runs are long because their rates are."""

_TABLE = TableEffort(seeds=5, requests=100_000, tolerance_ratio=0.0025)
_QUICK_TABLE = TableEffort(seeds=2, requests=10_000, tolerance_ratio=0.01)
_SWEEP = SweepEffort(requests=20_000, tolerance_ratio=0.01, again=3, again_requests=20_000)
_QUICK_SWEEP = SweepEffort(requests=4_000, tolerance_ratio=0.02, again=0, again_requests=0)


def run(quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Measures both parts and writes the page.

    Args:
        quick: fewer cells, seeds and requests.
        full: every cell.
        out: where the page goes when this is a look or no checkout.
    """
    rows = measure_table(_QUICK_TABLE if quick else _TABLE)
    if full:
        cells = every()
    elif quick:
        # Twice as many again, because the fast cells are left out.
        drawn = sample(4 * QUICK_CELLS, SAMPLE_SEED)
        cells = [cell for cell in drawn if cell.most_rps <= MOST_QUICK_RPS][:QUICK_CELLS]
    else:
        cells = sample(CELLS, SAMPLE_SEED)
    found = measure_cells(cells, _QUICK_SWEEP if quick else _SWEEP)
    result = BenchResult(
        rows=[shown_row(row) for row in rows],
        figures=_figures(rows, found),
        notes=[*_notes(_QUICK_TABLE if quick else _TABLE, found), *bounds()],
    )
    tables = {
        "Table 2: goodput on eight GPUs": result.rows,
        f"Cells where deferred has less than {LOW_RATIO:g} of eager's goodput": [
            shown_cell(cell) for cell in below(found, LOW_RATIO)
        ],
        "Deferred over eager: distribution": [
            {"cells of": name, **row} for name, row in distribution(found).items()
        ],
        "All cells": [shown_cell(cell) for cell in found],
    }
    is_page = batching_report.FOLDER.parent.is_dir() and not quick
    batching_report.write(
        batching_report.FOLDER if is_page else out, document("batching", result) | {"tables": tables}
    )
    return result


def _figures(rows: list[TableRow], found: list[CellResult]) -> dict[str, Figure]:
    ours = {row.measured.model.name: row.rates_rps for row in rows if row.system == "deferred"}
    ratios = [cell.ratio for cell in found]
    return {
        "resnet50_rps": Figure(
            ours["ResNet50"], "goodput of deferred, ResNet50 at 25 ms on 8 GPUs, by seed", "above 5264; 5547"
        ),
        "inception_rps": Figure(
            ours["InceptionResNetV2"],
            "goodput of deferred, InceptionResNetV2 at 70 ms on 8 GPUs, by seed",
            "above 926; 1029",
        ),
        "cells_below_095_ratio": Figure(
            [len(below(found, LOW_RATIO)) / len(found)],
            f"share of {len(found)} cells where deferred has less than 0.95 of eager's goodput",
            "at most 0.01",
        ),
        "cells_below_090": Figure(
            [float(len(below(found, FLOOR_RATIO)))], "cells where it has less than 0.90", "0"
        ),
        "least_ratio": Figure([min(ratios)], "deferred over eager where it is lowest", "at least 0.9"),
        "median_ratio": Figure(
            ratios,
            "deferred over eager, median and quartiles over the cells",
            "",
            max_spread_ratio=float("inf"),
        ),
    }


def _notes(effort: TableEffort, found: list[CellResult]) -> list[str]:
    again = sum(cell.is_again for cell in found)
    return [
        "goodput: the highest rate at which every model has at most 1 % of its requests late or dropped",
        "it is found by bisection on one pattern of arrivals, which is scaled to each rate",
        f"Table 2: Poisson arrivals, {effort.seeds} seeds, {effort.requests} a run, 5 SLOs of warm-up",
        f"Table 2: search to {effort.tolerance_ratio:.2%}; no network delay (the paper has a real network)",
        "queueing: from arrival to the start of the batch, at a system's own goodput",
        "in brackets: the best timeout, the best share for a batch of Nexus, as shares of the SLO",
        "those were found on arrivals that are not measured",
        "`algorithm-1` is Symphony's algorithm as printed, `deferred` is ours",
        "cells: gamma arrivals, equally popular models; mixed: all models of a GPU's table, own SLOs",
        f"cells: windows of {SLOS_A_RUN} SLOs and {SQUARED_CVS} squared CVs of the gaps at least",
        "copies of one model are exchangeable and judged together, models of a mixed cell each for itself",
        "cells in which l(1) is above the SLO are left out",
        f"first look below {CLOSE_RATIO:g}: measured anew, longer, on several seeds: {again} of {len(found)}",
    ]

"""`keystage bench tuning`: the same search, budget and worlds for Keystage's policy and its rivals.

Before it: `paper_run` performs cells. After it: the settings the paper experiment uses, with the score of the
defaults beside them. It tunes on seeds of its own (from `FIRST_SEED` on), which the experiment never uses.

Worlds: the middle model of Table 1 by execution time at CV 1, 4 and 8, the slowest at CV 4, BERT-21B on the
trace with its tight objective, each once under the terms of either table. Score: mean over worlds of the
logarithm of mean latency, plus `OVER_PRICE` times the logarithm of GPU-seconds above the common allowance
(utilisation `ALLOWED_RATIO`), so that nobody wins by taking more than the others may; the policy's `effort`
is searched like any other parameter. The allowance depends on the load alone, on no policy. What was found is
kept in `tuning_chosen`; Table A uses all of it, Table B sets every rival's effort anew.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keystage.baselines import cocktail, inferline, infless
from keystage.baselines.tunable import Range, Ranges
from keystage.bench.config import BenchSettings
from keystage.bench.frame import BenchResult, Figure
from keystage.bench.paper_arrivals import load_trace
from keystage.bench.paper_cells import Cell
from keystage.bench.paper_models import CORES, MODELS, stage_parts
from keystage.bench.paper_run import Run, changes, perform
from keystage.bench.paper_world import Table
from keystage.bench.tuning_search import Found, Value, search

FIRST_SEED = 9000
ALLOWED_RATIO = 0.6
OVER_PRICE = 5.0
BUDGET = 48
"""Trials for each policy; a trial is every cell under every draw."""

Draw = tuple[Table, int]
"""The table whose terms hold, and the seed."""

DRAWS: tuple[Draw, ...] = (("A", FIRST_SEED), ("B", FIRST_SEED + 1))

EFFORT = Range(0.25, 4.0, is_log=True)

KEYSTAGE: Ranges = {
    "drain_ratio": Range(0.25, 4.0, is_log=True),
    "drain_start_ratio": Range(0.1, 2.0, is_log=True),
    "hold_s": Range(2.0, 60.0, is_log=True),
    "hold_start_ratio": Range(0.5, 8.0, is_log=True),
    "carry_ratio": Range(0.6, 0.98),
    "estimator.fast_s": Range(0.5, 6.0, is_log=True),
    "gains.kp": Range(0.02, 0.6, is_log=True),
}
"""Ranges of the policy's own settings: as many as the rivals' have."""

POLICIES: Mapping[str, Ranges] = {
    "keystage": KEYSTAGE,
    "infless": infless.RANGES,
    "inferline": inferline.RANGES,
    "cocktail": cocktail.RANGES,
}

CELLS = (
    Cell("cv", 2, 1.0, 40.0),
    Cell("cv", 2, 4.0, 40.0),
    Cell("cv", 2, 8.0, 60.0),
    Cell("cv", 4, 4.0, 60.0),
    Cell("trace", 1, 0.0, 120.0, 60.0),
)


def allowed_gpu_s(cell: Cell) -> float:
    """GPU-seconds of a cell at the common utilisation: its items' service seconds over `ALLOWED_RATIO`."""
    item_s = math.fsum(
        (alpha_s * cell.of.most + beta_s) / cell.of.most + cpu_core_s / CORES
        for alpha_s, beta_s, cpu_core_s in stage_parts(cell.of)
    )
    return cell.rate_rps * cell.duration_s * item_s / ALLOWED_RATIO


def score(
    policy: str,
    values: Mapping[str, Value],
    cells: Sequence[Cell],
    draws: Sequence[Draw],
    traces: Path | None = None,
) -> float:
    """What settings of a policy are worth; less is better."""
    given = {name: value for name, value in values.items() if name != "effort"}
    effort = float(values.get("effort", 1.0))
    total = 0.0
    for cell in cells:
        for table, seed in draws:
            got = perform(Run(cell, policy, table, seed, effort, changes(given), traces))
            over = math.log(got.gpu_s / allowed_gpu_s(cell))
            total += math.log(got.mean_s) + OVER_PRICE * max(0.0, over)
    return total / (len(cells) * len(draws))


def tune(
    policy: str,
    budget: int = BUDGET,
    cells: Sequence[Cell] = CELLS,
    draws: Sequence[Draw] = DRAWS,
    traces: Path | None = None,
) -> Found:
    """Tunes one policy by name.

    Args:
        policy: its name.
        budget: trials.
        cells: cells of each trial.
        draws: tables and seeds of each trial.
        traces: folder of traces, None for the usual place.

    Raises:
        KeyError: nothing can be tuned under that name.
    """
    ranges = {**POLICIES[policy], "effort": EFFORT}
    return search(lambda values: score(policy, values, cells, draws, traces), ranges, budget, seed=FIRST_SEED)


def run(*, quick: bool = False) -> BenchResult:
    """Tunes every policy and says what was chosen.

    Raises:
        PaperTraceError: a traces folder was named that cannot be used.
    """
    traces = BenchSettings().trace_folder
    load_trace(len(MODELS), traces)  # found unusable now rather than in the middle
    rows, figures, notes = [], {}, []
    for policy in POLICIES:
        print(f"tuning {policy}", file=sys.stderr)
        found = tune(policy, 4, CELLS[:1], DRAWS[:1], traces) if quick else tune(policy, traces=traces)
        before, best = found.trials[0].score, found.best
        rows.append(
            {
                "policy": policy,
                "trials": len(found.trials),
                "score of defaults": before,
                "best score": best.score,
            }
        )
        figures[f"gain_{policy}"] = Figure(
            [math.exp(best.score - before)], "score of the chosen settings over that of the defaults"
        )
        notes.append(f"{policy}: {_told(best.values)}")
    return BenchResult(rows, figures, notes)


def _told(values: Mapping[str, Value]) -> str:
    if not values:
        return "the defaults"
    return ", ".join(f"{k} = {v:.4g}" if isinstance(v, float) else f"{k} = {v}" for k, v in values.items())

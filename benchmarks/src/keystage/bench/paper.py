"""`keystage bench paper`: QUART's figures 2, 3, 6, 7 and 8 remade, beside what it printed.

Before it: nothing. After it: the frame's tables, and under OUT/paper the PNG figures, every run and the
ratios model by model as CSV. Table A gives everybody the paper's loading; Table B gives all the same
loading and, by each policy's knob, the same GPU-seconds in every cell: claims rest on B. See `paper_world`
for the cluster, `paper_models` for the models, `paper_cells` for loads and sizes, `paper_ratios` for the
intervals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from keystage.bench import paper_by_model, paper_figures, paper_tables
from keystage.bench.config import BenchSettings
from keystage.bench.frame import BenchResult
from keystage.bench.paper_ablations import ablated
from keystage.bench.paper_arrivals import load_trace
from keystage.bench.paper_case_study import case_studies
from keystage.bench.paper_cells import (
    CV_LOAD,
    CV_SLO,
    FULL,
    MOST_OF_WHOLE_RATIO,
    QUICK,
    SHORT,
    TRACE_LOAD,
    TRACE_SLO,
    Size,
)
from keystage.bench.paper_equal import TOLERANCE_RATIO
from keystage.bench.paper_models import MODELS
from keystage.bench.paper_policies import OURS, RIVALS, STATIC
from keystage.bench.paper_run import Pool, Run, Score, changes
from keystage.bench.paper_search import Equalised, by_policy, equalise
from keystage.bench.paper_world import Table
from keystage.bench.tuning_chosen import chosen

MOST_PROCESSES = 8


def run(*, quick: bool = False, full: bool = False, out: Path = Path("out")) -> BenchResult:
    """Runs the experiment.

    Args:
        quick: a look: two models, two seeds.
        full: all models, CVs and seeds, and the ablations.
        out: figures and runs go to its folder `paper`.

    Raises:
        PaperTraceError: a traces folder was named that cannot be used.
    """
    begun_s = time.monotonic()
    size = FULL if full else QUICK if quick else SHORT
    traces = BenchSettings().trace_folder
    trace = load_trace(len(MODELS), traces)  # found unusable now rather than in a worker
    folder = out / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0))))
    with Pool(processes) as pool:
        table_a = as_published(pool, size, traces)
        table_b, searches = at_equal_cost(pool, size, traces)
        parts = ablated(pool, size, table_a[OURS], traces) if size.has_ablations else []
        studies = case_studies(folder, size.seeds)
    for suffix, scores in (("", table_a), ("-equal", table_b)):
        paper_figures.draw(folder, scores, suffix)
    everything = [s for scores in (*table_a.values(), *table_b.values()) for s in scores]
    paper_tables.write_scores(folder / "runs.csv", everything + [s for part in parts for s in part.scores])
    unequal = [one for one in searches if not one.is_equal]
    missed = frozenset((one.start.cell, one.start.policy) for one in unequal)
    by_model = paper_by_model.lines("A", table_a) + paper_by_model.lines("B", table_b, missed)
    paper_by_model.write(folder / "by-model.csv", by_model)
    rows = paper_tables.rows("A", table_a) + paper_tables.rows("B", table_b, missed)
    figures = paper_tables.figures(table_a, "", targets=True)
    figures |= paper_tables.figures(table_b, "_equal", targets=False, missed=missed)
    notes = [
        *_method(size, trace.source, trace.gap_cv),
        *studies,
        *(part.text for part in parts),
        *paper_tables.losses("A", table_a),
        *paper_tables.losses("B", table_b, missed),
        *paper_tables.left_out(table_b, missed),
        *paper_by_model.sentences(by_model),
        *(_unequal(one) for one in unequal),
        (
            f"{pool.runs} runs, {pool.events:,} events in {time.monotonic() - begun_s:.0f} s on {processes} "
            f"processes; PNG figures (all pairs), runs.csv and by-model.csv in {folder}"
        ),
    ]
    return BenchResult(rows, figures, notes)


def as_published(pool: Pool, size: Size, traces: Path | None) -> dict[str, list[Score]]:
    """Table A: every policy as tuned, with the paper's loading."""
    return by_policy(pool.perform(_plan(size, "A", (OURS, *RIVALS), traces), "table A"))


def at_equal_cost(
    pool: Pool, size: Size, traces: Path | None
) -> tuple[dict[str, list[Score]], list[Equalised]]:
    """Table B: Keystage as tuned sets the GPU-seconds of a cell, the others are brought there.

    Returns:
        Scores by policy, at the efforts found, and the search of each cell and policy.
    """
    ours = pool.perform(_plan(size, "B", (OURS,), traces), "table B, ours")
    starts = [run for run in _plan(size, "B", (*RIVALS, STATIC), traces) if run.seed == size.seeds[0]]
    others = equalise(pool, ours, starts, size.searching, "table B")
    return by_policy([*ours, *(s for one in others for s in one.scores)]), others


def _plan(size: Size, table: Table, names: Sequence[str], traces: Path | None) -> list[Run]:
    return [
        Run(cell, name, table, seed, effort, changes=changes(values), traces=traces)
        for name in names
        for effort, values in [chosen(name)]
        for cell in size.cells()
        for seed in size.seeds
    ]


def _method(size: Size, source: str, gap_cv: float) -> list[str]:
    names = ", ".join(MODELS[m].name for m in size.models)
    spans = ", ".join(f"CV {cv:g}: {size.cv_s[cv]:g} s" for cv in size.cvs)
    efforts = "; ".join(
        f"{m.name} alpha {1e3 * m.alpha_s:.3g} ms, beta {1e3 * m.beta_s:.3g} ms, batches of {m.most}"
        for m in (MODELS[i] for i in size.models)
    )
    return [
        (
            "ratios are ours / theirs, geometric means over cells, paired by seed, with 95 % Student "
            "intervals over seeds; + won, = not told apart, - lost, for latency, p99, goodput; `pooled` is "
            "the same verdict with intervals over (cell, seed), as if models were samples"
        ),
        (
            f"{names}; seeds {', '.join(map(str, size.seeds))} (the policy's defaults were developed on 0 "
            f"to 4, rivals tuned on 9000 and up); l(b) of whole models: {efforts}"
        ),
        (
            f"trace: {source}, within-minute CV {gap_cv:.2f}, {size.trace_s:g} s windows of which the first "
            f"{size.warm_s:g} s do not count, mean {TRACE_LOAD:g}x one replica, objective {TRACE_SLO:g}x"
        ),
        (
            f"CV cells ({spans}) at {CV_LOAD:g}x one replica, at most {MOST_OF_WHOLE_RATIO:g} of what "
            f"whole-model instances serve on the cluster, objective {CV_SLO:g}x; everybody starts with one"
        ),
        (
            "GPU-seconds: GPUs held by replicas from wanted to gone, until the last answer; table B searches "
            f"each rival's effort per cell and model on these very seeds: {len(size.grid)} efforts on "
            f"{size.grid_seeds} of them, then every crossing of the common figure, at most "
            f"{size.evaluations} efforts on all (two close ones may share them), the least latency of what "
            "is equal; ratios, figures and verdicts are over equal pairs; `static` knows mean rate and CV"
        ),
    ]


def _unequal(one: Equalised) -> str:
    choice = one.search.choice
    return (
        f"not equal: {one.label} used {choice.gpu_s / one.search.target_gpu_s:.3f} of the common "
        f"{one.search.target_gpu_s:.0f} GPU-seconds at best (effort {choice.efforts[0]:.3g}, "
        f"{len(one.search.tried)} tried); the bound is {TOLERANCE_RATIO:.0%}"
    )

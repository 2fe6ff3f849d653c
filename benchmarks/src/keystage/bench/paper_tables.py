"""Rows, figures and verdicts of the paper experiment.

Before it: scores of Table A and Table B. After it: `paper` hands them to the frame, and writes them as
CSV. Cells lost and ratios missed are sentences here, not omissions.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keystage.bench.frame import Figure
from keystage.bench.paper_policies import OURS, RIVALS
from keystage.bench.paper_ratios import (
    GOODPUT,
    GPU_S,
    LATENCY,
    MEASURES,
    PUBLISHED,
    Published,
    Ratio,
    ratio,
)
from keystage.bench.paper_run import PERCENTILES, SLO_RATIOS, Score
from keystage.bench.paper_world import Table

ALL_CVS = "cv all"
WIN_FROM_CV = 2.0

ByPolicy = Mapping[str, Sequence[Score]]


def groups(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Scores by cell of the tables: trace, each CV, and all CVs together."""
    by_group: dict[str, list[Score]] = {}
    for score in scores:
        by_group.setdefault(score.run.cell.group, []).append(score)
    varied = [s for s in scores if s.run.cell.load == "cv"]
    if len({s.run.cell.cv for s in varied}) > 1:
        by_group[ALL_CVS] = varied
    return by_group


def rows(table: Table, by_policy: ByPolicy, unequal: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row per cell and rival: ratios beside the published ones, and GPU-seconds.

    Args:
        table: which.
        by_policy: scores by policy name.
        unequal: `group model policy` labels that missed the common GPU-seconds.
    """
    found: list[dict[str, Any]] = []
    ours = groups(by_policy[OURS])
    for name in [n for n in by_policy if n != OURS]:
        theirs = groups(by_policy[name])
        for group, mine in ours.items():
            ratios = {m.name: ratio(mine, theirs[group], m) for m in MEASURES}
            printed = PUBLISHED.get((group, name), Published(None, None))
            missed = sum(1 for label in unequal if label.startswith(f"{group} ") and label.endswith(name))
            found.append(
                {
                    "table": table,
                    "cell": group,
                    "rival": name,
                    "latency": ratios["latency"].text,
                    "paper": "" if printed.latency is None else f"{printed.latency:.3g}",
                    "p99": ratios["p99"].text,
                    "goodput": ratios["goodput"].text,
                    "paper_goodput": "" if printed.goodput is None else f"{printed.goodput:.3g}",
                    "gpu_s": f"{_mean_gpu_s(mine):.0f}",
                    "their_gpu_s": f"{_mean_gpu_s(theirs[group]):.0f}",
                    "verdict": _verdict(ratios) + (f", {missed} not equal" if missed else ""),
                    "pooled": _verdict({key: value.pooled for key, value in ratios.items()}),
                }
            )
    return found


def figures(by_policy: ByPolicy, suffix: str, targets: bool) -> dict[str, Figure]:
    """The figures with fixed names; one sample a seed (geometric mean over models).

    Args:
        by_policy: scores by policy name.
        suffix: empty for Table A, `_equal` for Table B.
        targets: whether the published ratios are the target.
    """
    found: dict[str, Figure] = {}
    ours = groups(by_policy[OURS])
    wanted = (
        ("latency", "trace", LATENCY, "mean latency on the trace (Figure 6a)"),
        ("goodput_slo15", "trace", GOODPUT, "tokens within 1.5x on the trace (Figure 6b)"),
        ("goodput_cv8", "cv 8", GOODPUT, "tokens within the lenient objective at CV 8 (Figure 7b)"),
        ("latency_cvs", ALL_CVS, LATENCY, "mean latency over all CVs (Figure 7a)"),
        ("goodput_cvs", ALL_CVS, GOODPUT, "tokens within the lenient objective over all CVs (Figure 7b)"),
    )
    for key, group, measure, meaning in wanted:
        for name in RIVALS:
            if group not in ours or name not in by_policy:
                continue
            value = ratio(ours[group], groups(by_policy[name])[group], measure)
            printed = PUBLISHED.get((group, name), Published(None, None))
            goal = printed.latency if measure is LATENCY else printed.goodput
            side = "below" if measure.is_less_better else "above"
            target = f"{side} {goal:.3g} (paper)" if targets and goal is not None else f"{side} 1"
            found[f"{key}_vs_{name}{suffix}"] = Figure(
                value.by_seed, f"{meaning}, ours / {name}", target, max_spread_ratio=1.0
            )
    return found


def losses(table: Table, by_policy: ByPolicy) -> list[str]:
    """Sentences on cells lost, cells of Table B not won from CV 2 up, and published ratios missed."""
    found: list[str] = []
    ours = groups(by_policy[OURS])
    for name in [n for n in RIVALS if n in by_policy]:
        theirs = groups(by_policy[name])
        for group, mine in ours.items():
            is_bursty = group.startswith("cv ") and group != ALL_CVS and mine[0].run.cell.cv >= WIN_FROM_CV
            for measure in MEASURES:
                value = ratio(mine, theirs[group], measure)
                where = f"table {table}, {group}, {measure.name} vs {name}: {value.text}"
                if value.is_lost(measure):
                    found.append(f"LOST: {where}")
                elif table == "B" and is_bursty and not value.is_won(measure):
                    found.append(f"not won: {where}")
                elif table == "B" and is_bursty and not value.pooled.is_won(measure):
                    found.append(f"won over seeds, not with models as samples: {where} {value.pooled.text}")
            if table == "A":
                found += _missed(group, name, mine, theirs[group])
    return found


def _missed(group: str, name: str, mine: Sequence[Score], theirs: Sequence[Score]) -> list[str]:
    printed = PUBLISHED.get((group, name))
    if printed is None:
        return []
    found = []
    for measure, goal in ((LATENCY, printed.latency), (GOODPUT, printed.goodput)):
        value = ratio(mine, theirs, measure)
        if goal is not None and (value.mean > goal if measure.is_less_better else value.mean < goal):
            found.append(
                f"paper's ratio missed: {group}, {measure.name} vs {name}: {value.text}, printed {goal:.3g}"
            )
    return found


def _verdict(ratios: Mapping[str, Ratio]) -> str:
    words = []
    for measure in MEASURES:
        value = ratios[measure.name]
        words.append("+" if value.is_won(measure) else "-" if value.is_lost(measure) else "=")
    return "".join(words)


def _mean_gpu_s(scores: Sequence[Score]) -> float:
    return float(np.mean([GPU_S.value(s) for s in scores]))


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """All runs, one a line, for whoever wants another table."""
    head = ["table", "cell", "model", "policy", "seed", "effort", "counted", "unserved", "achieved_cv"]
    head += ["mean_s", *(f"p{rank}_s" for rank in PERCENTILES)]
    head += [f"goodput_{r:g}x_tps" for r in SLO_RATIOS] + [f"met_{r:g}x_ratio" for r in SLO_RATIOS]
    head += ["queue", "gpu_s", "starts", "events", "wall_s"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for s in scores:
            run = s.run
            names = [run.table, run.cell.group, run.cell.of.name, run.policy, run.seed, f"{run.effort:.5g}"]
            values = [s.mean_s, *s.percentiles_s, *s.goodput_tps, *s.met_ratios, s.queue, s.gpu_s]
            starts = " ".join(f"{source}:{number}" for source, number in sorted(s.starts.items()))
            writer.writerow(
                [
                    *names,
                    s.counted,
                    s.unserved,
                    f"{s.achieved_cv:.4g}",
                    *(f"{v:.6g}" for v in values),
                    starts,
                    s.events,
                    f"{s.wall_s:.2f}",
                ]
            )

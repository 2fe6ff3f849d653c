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
from keystage.bench.paper_pairs import ALL_CVS, NONE, ByPolicy, Missed, Pairs, paired
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

WIN_FROM_CV = 2.0


def rows(table: Table, by_policy: ByPolicy, missed: Missed = NONE) -> list[dict[str, Any]]:
    """One row per cell and rival: ratios over equal pairs beside the published ones, and GPU-seconds.

    Args:
        table: which.
        by_policy: scores by policy name.
        missed: pairs to be left out, which each row names.
    """
    found: list[dict[str, Any]] = []
    for name in [n for n in by_policy if n != OURS]:
        for group, pairs in paired(by_policy, name, missed).items():
            ratios = {m.name: pairs.ratio(m) for m in MEASURES}
            printed = PUBLISHED.get((group, name), Published(None, None))
            found.append(
                {
                    "table": table,
                    "cell": group,
                    "rival": name,
                    "latency": _text(ratios["latency"]),
                    "paper": "" if printed.latency is None else f"{printed.latency:.3g}",
                    "p99": _text(ratios["p99"]),
                    "goodput": _text(ratios["goodput"]),
                    "paper_goodput": "" if printed.goodput is None else f"{printed.goodput:.3g}",
                    "gpu_s": _mean_gpu_s(pairs.mine),
                    "their_gpu_s": _mean_gpu_s(pairs.theirs),
                    "verdict": _verdict(ratios),
                    "pooled": _verdict({k: v.pooled if v is not None else None for k, v in ratios.items()}),
                    "left_out": f"{len(pairs.left_out)}: {', '.join(pairs.left_out)}"
                    if pairs.left_out
                    else "",
                }
            )
    return found


def left_out(by_policy: ByPolicy, missed: Missed) -> list[str]:
    """A sentence a rival on the pairs that ratios, figures and verdicts leave out."""
    found = []
    for name in [n for n in by_policy if n != OURS]:
        cells = list(dict.fromkeys(s.run.cell for s in by_policy[name]))
        names = [f"{c.of.name} at {c.group}" for c in cells if (c, name) in missed]
        if names:
            found.append(
                f"left out of table B against {name}, GPU-seconds not equal: {len(names)} of {len(cells)} "
                f"pairs: {', '.join(names)}; by-model.csv has the ratios with all pairs"
            )
    return found


def figures(by_policy: ByPolicy, suffix: str, targets: bool, missed: Missed = NONE) -> dict[str, Figure]:
    """The figures with fixed names; one sample a seed (geometric mean over models of equal pairs).

    A figure none of whose pairs is equal is absent.

    Args:
        by_policy: scores by policy name.
        suffix: empty for Table A, `_equal` for Table B.
        targets: whether the published ratios are the target.
        missed: pairs to be left out.
    """
    found: dict[str, Figure] = {}
    pairs = {name: paired(by_policy, name, missed) for name in RIVALS if name in by_policy}
    wanted = (
        ("latency", "trace", LATENCY, "mean latency on the trace (Figure 6a)"),
        ("goodput_slo15", "trace", GOODPUT, "tokens within 1.5x on the trace (Figure 6b)"),
        ("goodput_cv8", "cv 8", GOODPUT, "tokens within the lenient objective at CV 8 (Figure 7b)"),
        ("latency_cvs", ALL_CVS, LATENCY, "mean latency over all CVs (Figure 7a)"),
        ("goodput_cvs", ALL_CVS, GOODPUT, "tokens within the lenient objective over all CVs (Figure 7b)"),
    )
    for key, group, measure, meaning in wanted:
        for name, by_group in pairs.items():
            value = by_group[group].ratio(measure) if group in by_group else None
            if value is None:
                continue
            printed = PUBLISHED.get((group, name), Published(None, None))
            goal = printed.latency if measure is LATENCY else printed.goodput
            side = "below" if measure.is_less_better else "above"
            target = f"{side} {goal:.3g} (paper)" if targets and goal is not None else f"{side} 1"
            found[f"{key}_vs_{name}{suffix}"] = Figure(
                value.by_seed, f"{meaning}, ours / {name}", target, max_spread_ratio=1.0
            )
    return found


def losses(table: Table, by_policy: ByPolicy, missed: Missed = NONE) -> list[str]:
    """Sentences on cells lost, cells of Table B not won from CV 2 up, and published ratios missed.

    Over equal pairs; a cell without any is said to be neither won nor lost.
    """
    found: list[str] = []
    for name in [n for n in RIVALS if n in by_policy]:
        for group, pairs in paired(by_policy, name, missed).items():
            if not pairs.mine:
                found.append(f"neither won nor lost: table {table}, {group} vs {name}: no pair is equal")
                continue
            cv = pairs.mine[0].run.cell.cv
            is_bursty = group.startswith("cv ") and group != ALL_CVS and cv >= WIN_FROM_CV
            for measure in MEASURES:
                value = ratio(pairs.mine, pairs.theirs, measure)
                where = f"table {table}, {group}, {measure.name} vs {name}: {value.text}"
                if value.is_lost(measure):
                    found.append(f"LOST: {where}")
                elif table == "B" and is_bursty and not value.is_won(measure):
                    found.append(f"not won: {where}")
                elif table == "B" and is_bursty and not value.pooled.is_won(measure):
                    found.append(f"won over seeds, not with models as samples: {where} {value.pooled.text}")
            if table == "A":
                found += _missed(group, name, pairs)
    return found


def _missed(group: str, name: str, pairs: Pairs) -> list[str]:
    printed = PUBLISHED.get((group, name))
    if printed is None:
        return []
    found = []
    for measure, goal in ((LATENCY, printed.latency), (GOODPUT, printed.goodput)):
        value = ratio(pairs.mine, pairs.theirs, measure)
        if goal is not None and (value.mean > goal if measure.is_less_better else value.mean < goal):
            found.append(
                f"paper's ratio missed: {group}, {measure.name} vs {name}: {value.text}, printed {goal:.3g}"
            )
    return found


def _verdict(ratios: Mapping[str, Ratio | None]) -> str:
    words = []
    for measure in MEASURES:
        value = ratios[measure.name]
        if value is None:
            return "no equal pair"
        words.append("+" if value.is_won(measure) else "-" if value.is_lost(measure) else "=")
    return "".join(words)


def _text(value: Ratio | None) -> str:
    return "-" if value is None else value.text


def _mean_gpu_s(scores: Sequence[Score]) -> str:
    return f"{np.mean([GPU_S.value(s) for s in scores]):.0f}" if scores else "-"


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

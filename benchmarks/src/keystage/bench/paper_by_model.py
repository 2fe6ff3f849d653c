"""The same ratios model by model, where the pooled ones could hide a loss.

Before it: scores of a table. After it: `by-model.csv`, and one sentence a rival in `paper`. A model has
one pair a seed only, so its intervals are wide; a loss that shows here is one all the same.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from keystage.bench.paper_pairs import ALL_CVS, NONE, ByPolicy, Missed, groups
from keystage.bench.paper_policies import OURS
from keystage.bench.paper_ratios import MEASURES, Measure, Ratio, ratio
from keystage.bench.paper_world import Table

ALL_MODELS = "all models"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One measure in one cell against one rival, of one model or of all.

    Attributes:
        table: which.
        group: cell of the tables.
        model: its name, or `ALL_MODELS`: the pooled ratio with all pairs, equal or not.
        rival: who.
        measure: what.
        value: ours over theirs.
        is_equal: whether GPU-seconds of all its pairs are equal, where the table makes them so.
    """

    table: Table
    group: str
    model: str
    rival: str
    measure: Measure
    value: Ratio
    is_equal: bool


def lines(table: Table, by_policy: ByPolicy, missed: Missed = NONE) -> list[Line]:
    """All of a table; pairs that are not equal are marked, not left out."""
    found = []
    ours = groups(by_policy[OURS])
    for name in [n for n in by_policy if n != OURS]:
        theirs = groups(by_policy[name])
        for group, mine in ours.items():
            models = [] if group == ALL_CVS else list(dict.fromkeys(s.run.cell.of.name for s in mine))
            for model in (*models, ALL_MODELS):
                own, other = (
                    [s for s in scores if model in (s.run.cell.of.name, ALL_MODELS)]
                    for scores in (mine, theirs[group])
                )
                is_equal = not any((s.run.cell, name) in missed for s in own)
                found += [
                    Line(table, group, model, name, m, ratio(own, other, m), is_equal) for m in MEASURES
                ]
    return found


def sentences(found: Sequence[Line]) -> list[str]:
    """Which models lose to whom at equal GPU-seconds, one sentence a table, rival and measure."""
    lost: dict[tuple[str, str, str], list[Line]] = {}
    for line in found:
        if line.model != ALL_MODELS and line.is_equal and line.value.is_lost(line.measure):
            lost.setdefault((line.table, line.rival, line.measure.name), []).append(line)
    said = []
    for (table, rival, measure), own in lost.items():
        by_model: dict[str, list[str]] = {}
        for line in own:
            by_model.setdefault(line.model, []).append(f"{line.value.mean:.2f} at {line.group}")
        text = "; ".join(f"{model} {', '.join(cells)}" for model, cells in by_model.items())
        said.append(f"by model, table {table}, {measure} lost to {rival}: {text}")
    return said


def write(path: Path, found: Sequence[Line]) -> None:
    """All lines as CSV.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("table", "cell", "model", "rival", "measure", "ratio", "low", "high", "equal"))
        for line in found:
            numbers = (f"{v:.4g}" for v in (line.value.mean, line.value.low, line.value.high))
            is_equal = "yes" if line.is_equal else "no"
            writer.writerow(
                (line.table, line.group, line.model, line.rival, line.measure.name, *numbers, is_equal)
            )

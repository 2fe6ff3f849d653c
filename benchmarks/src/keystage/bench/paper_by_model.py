"""The same ratios model by model, where the pooled ones could hide a loss.

Before it: scores of a table. After it: `by-model.csv`, and one sentence a rival in `paper`. A model has
one pair a seed only, so its intervals are wide; a loss that shows here is one all the same.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from keystage.bench.paper_policies import OURS
from keystage.bench.paper_ratios import MEASURES, Measure, Ratio, ratio
from keystage.bench.paper_run import Score
from keystage.bench.paper_tables import ALL_CVS, groups
from keystage.bench.paper_world import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One measure of one model in one cell against one rival."""

    table: Table
    group: str
    model: str
    rival: str
    measure: Measure
    value: Ratio


def lines(table: Table, by_policy: Mapping[str, Sequence[Score]]) -> list[Line]:
    """All of a table."""
    found = []
    ours = groups(by_policy[OURS])
    for name in [n for n in by_policy if n != OURS]:
        theirs = groups(by_policy[name])
        for group in [g for g in ours if g != ALL_CVS]:
            for model in dict.fromkeys(s.run.cell.of.name for s in ours[group]):
                mine, other = (
                    [s for s in scores if s.run.cell.of.name == model]
                    for scores in (ours[group], theirs[group])
                )
                found += [Line(table, group, model, name, m, ratio(mine, other, m)) for m in MEASURES]
    return found


def sentences(found: Sequence[Line]) -> list[str]:
    """Which models lose to whom, one sentence a table, rival and measure."""
    lost: dict[tuple[str, str, str], list[Line]] = {}
    for line in found:
        if line.value.is_lost(line.measure):
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
        writer.writerow(("table", "cell", "model", "rival", "measure", "ratio", "low", "high"))
        for line in found:
            numbers = (f"{v:.4g}" for v in (line.value.mean, line.value.low, line.value.high))
            writer.writerow((line.table, line.group, line.model, line.rival, line.measure.name, *numbers))

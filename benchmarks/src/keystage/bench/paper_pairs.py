"""Which runs of ours are compared with which of a rival's: groups of cells, and pairs at equal GPU-seconds.

Before it: scores of a table, and which (cell, rival) could not be brought to the common GPU-seconds. After
it: `paper_tables`, `paper_by_model`. A pair that is not equal says nothing at equal cost: it is left out of
ratios, figures and verdicts, and named. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keystage.bench.paper_cells import Cell
from keystage.bench.paper_policies import OURS
from keystage.bench.paper_ratios import Measure, Ratio, ratio
from keystage.bench.paper_run import Score

ALL_CVS = "cv all"

ByPolicy = Mapping[str, Sequence[Score]]
Missed = frozenset[tuple[Cell, str]]
"""(cell, rival) that missed the common GPU-seconds."""

NONE: Missed = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """Runs of one group of cells that are compared.

    Attributes:
        mine: Keystage's.
        theirs: the rival's, of the same cells and seeds.
        left_out: cells left out, in words.
    """

    mine: tuple[Score, ...]
    theirs: tuple[Score, ...]
    left_out: tuple[str, ...]

    def ratio(self, measure: Measure) -> Ratio | None:
        """Ours over theirs; None where every pair is left out."""
        return ratio(self.mine, self.theirs, measure) if self.mine else None


def groups(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Scores by cell of the tables: trace, each CV, and all CVs together."""
    by_group: dict[str, list[Score]] = {}
    for score in scores:
        by_group.setdefault(score.run.cell.group, []).append(score)
    varied = [s for s in scores if s.run.cell.load == "cv"]
    if len({s.run.cell.cv for s in varied}) > 1:
        by_group[ALL_CVS] = varied
    return by_group


def paired(by_policy: ByPolicy, rival: str, missed: Missed = NONE) -> dict[str, Pairs]:
    """Pairs of every group against one rival."""
    theirs = groups(by_policy[rival])
    found = {}
    for group, mine in groups(by_policy[OURS]).items():
        left_out = [c for c in dict.fromkeys(s.run.cell for s in mine) if (c, rival) in missed]
        names = [f"{c.of.name} at {c.group}" if group == ALL_CVS else c.of.name for c in left_out]
        found[group] = Pairs(_without(mine, left_out), _without(theirs[group], left_out), tuple(names))
    return found


def _without(scores: Sequence[Score], cells: Sequence[Cell]) -> tuple[Score, ...]:
    return tuple(s for s in scores if s.run.cell not in cells)

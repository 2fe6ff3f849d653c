"""What each part of Keystage is worth: one part taken away, at the GPU-seconds of the whole.

Before it: Table A's terms (key stages in host memory). After it: sentences of `paper`. Cells: the trace,
and CV 4 and 8. Equal GPU-seconds as in Table B, since a part may also be worth GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from keystage.bench.paper_cells import Cell, Size
from keystage.bench.paper_equal import Searching
from keystage.bench.paper_pairs import groups
from keystage.bench.paper_policies import ABLATIONS, OURS
from keystage.bench.paper_ratios import MEASURES, ratio
from keystage.bench.paper_run import Pool, Run, Score, changes
from keystage.bench.paper_search import by_policy, equalise
from keystage.bench.tuning_chosen import chosen

ABLATED_CVS = (4.0, 8.0)
GRID = (0.85, 1.0, 1.18)
EVALUATIONS = 3
"""Without one part Keystage takes nearly what it takes with it: few efforts have to be tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ablation:
    """One part taken away.

    Attributes:
        name: which.
        scores: its runs.
        text: what it is worth, in words.
    """

    name: str
    scores: list[Score]
    text: str


def ablated(pool: Pool, size: Size, whole: Sequence[Score], traces: Path | None) -> list[Ablation]:
    """Runs every ablation.

    Args:
        pool: performs the runs.
        size: of the form.
        whole: Keystage's own runs of Table A.
        traces: folder of traces.
    """
    cells = [cell for cell in size.cells() if _is_ablated(cell)]
    effort, tuned = chosen(OURS)
    starts = [
        Run(c, name, "A", size.seeds[0], effort, changes=changes(tuned), traces=traces)
        for name in ABLATIONS
        for c in cells
    ]
    done = equalise(pool, whole, starts, Searching(size.seeds, EVALUATIONS, GRID), "ablations")
    ours = groups([s for s in whole if s.run.policy == OURS and _is_ablated(s.run.cell)])
    found = []
    for name, scores in by_policy([s for one in done for s in one.scores]).items():
        missed = sum(1 for one in done if one.start.policy == name and not one.search.is_equal)
        parts = []
        for group, theirs in groups(scores).items():
            values = [f"{m.name} {ratio(ours[group], theirs, m).text}" for m in MEASURES]
            parts.append(f"{group}: {', '.join(values)}")
        tail = f" ({missed} of {len(cells)} cells not within 2 % of GPU-seconds)" if missed else ""
        found.append(Ablation(name, scores, f"whole / {name}: {'; '.join(parts)}{tail}"))
    return found


def _is_ablated(cell: Cell) -> bool:
    return cell.load == "trace" or cell.cv in ABLATED_CVS

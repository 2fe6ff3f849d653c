"""Drives the effort searches of many cells and policies at once, so that processes stay busy.

Before it: Keystage's own runs, which set the common GPU-seconds. After it: scores at equal GPU-seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keystage.bench.paper_equal import EffortSearch, Try
from keystage.bench.paper_run import Pool, Run, Score


@dataclasses.dataclass(slots=True)
class Equalised:
    """One policy in one cell.

    Attributes:
        label: cell, model and policy, in words.
        start: its run with seed 0 and the effort tried first.
        search: the search for its effort.
        by_effort: scores of every effort tried, one a seed.
    """

    label: str
    start: Run
    search: EffortSearch
    by_effort: dict[float, list[Score]] = dataclasses.field(default_factory=dict)

    @property
    def scores(self) -> list[Score]:
        """One a seed, at the efforts chosen."""
        return [self.by_effort[effort][seed] for seed, effort in enumerate(self.search.choice.efforts)]


def equalise(
    pool: Pool, ours: Sequence[Score], starts: Sequence[Run], seeds: int, evaluations: int, what: str
) -> list[Equalised]:
    """Brings every start to the GPU-seconds ours used in its cell, mean over seeds.

    Args:
        pool: performs the runs.
        ours: scores that set the common figure, for all cells.
        starts: a run for each cell and policy.
        seeds: seeds 0 to this.
        evaluations: most efforts tried for each.
        what: for the progress lines.
    """
    found = []
    for start in starts:
        target = float(np.mean([s.gpu_s for s in ours if s.run.cell == start.cell]))
        label = f"{start.cell.group} {start.cell.of.name} {start.policy}"
        found.append(Equalised(label, start, EffortSearch(target, evaluations, start.effort)))
    for number in range(evaluations):
        asked = [(one, effort) for one in found if (effort := one.search.next_effort()) is not None]
        if not asked:
            break
        runs = [
            dataclasses.replace(one.start, seed=seed, effort=effort)
            for one, effort in asked
            for seed in range(seeds)
        ]
        scores = iter(pool.perform(runs, f"{what}, step {number + 1}"))
        for one, effort in asked:
            own = [next(scores) for _ in range(seeds)]
            one.by_effort[effort] = own
            one.search.tried.append(Try(effort, tuple(s.gpu_s for s in own), tuple(s.mean_s for s in own)))
    return found


def by_policy(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Scores by policy name, in the order of first appearance."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.run.policy, []).append(score)
    return found

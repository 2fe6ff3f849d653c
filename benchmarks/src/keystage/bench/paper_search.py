"""Drives the effort searches of many cells and policies at once, so that processes stay busy.

Before it: Keystage's own runs, which set the common GPU-seconds. After it: scores at equal GPU-seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from keystage.bench.paper_equal import EffortSearch, Searching, Try
from keystage.bench.paper_run import Pool, Run, Score


@dataclasses.dataclass(slots=True)
class Equalised:
    """One policy in one cell.

    Attributes:
        label: cell, model and policy, in words.
        start: a run of it with the effort in the middle of the grid.
        search: the search for its effort.
        by_effort: scores of every effort tried, by seed.
    """

    label: str
    start: Run
    search: EffortSearch
    by_effort: dict[float, list[Score]] = dataclasses.field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether it was brought to the common GPU-seconds."""
        return self.search.is_equal

    @property
    def scores(self) -> list[Score]:
        """One a seed, at the efforts chosen."""
        return [self.by_effort[effort][i] for i, effort in enumerate(self.search.choice.efforts)]


def equalise(
    pool: Pool, ours: Sequence[Score], starts: Sequence[Run], how: Searching, what: str
) -> list[Equalised]:
    """Brings every start to the GPU-seconds ours used in its cell, mean over seeds.

    Args:
        pool: performs the runs.
        ours: scores that set the common figure, for all cells and seeds.
        starts: a run for each cell and policy, of any seed.
        how: seeds, grid and budget.
        what: for the progress lines.
    """
    used = {(s.run.cell, s.run.seed): s.gpu_s for s in ours}
    found = []
    for start in starts:
        targets = tuple(used[start.cell, seed] for seed in how.seeds)
        label = f"{start.cell.group} {start.cell.of.name} {start.policy}"
        search = EffortSearch(targets, how.evaluations, start.effort, how.grid, how.grid_seeds)
        found.append(Equalised(label, start, search))
    for number in itertools.count(1):
        asked = [(one, ask) for one in found for ask in one.search.next_asks()]
        if not asked:
            return found
        runs = [
            [
                dataclasses.replace(one.start, seed=seed, effort=ask.effort)
                for seed in how.seeds[len(one.by_effort.get(ask.effort, ())) : ask.seeds]
            ]
            for one, ask in asked
        ]
        scores = iter(pool.perform(list(itertools.chain.from_iterable(runs)), f"{what}, step {number}"))
        for (one, ask), own in zip(asked, runs, strict=True):
            known = one.by_effort.setdefault(ask.effort, [])
            known += itertools.islice(scores, len(own))
            one.search.add(Try(ask.effort, tuple(s.gpu_s for s in known), tuple(s.mean_s for s in known)))
    raise AssertionError("a search ends by itself")


def by_policy(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Scores by policy name, in the order of first appearance."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.run.policy, []).append(score)
    return found

"""What is run: cells, sizes of the forms, and the arrivals of each cell.

Before it: `paper_models`, `paper_arrivals`. After it: `paper_run`. A cell is one load of one model; a
run is a cell under one policy and seed. Policies of one (cell, seed) meet the same arrivals and draws.

Figure 6: the trace at a mean of 1.5 times what one replica of each stage serves, deadline 1.5 execution
times (the multiple whose goodput the paper quotes), the first seconds not counted.
Figures 7 and 8: gamma gaps at three times one replica's capacity, at most half of the cluster's ("a
large QPS"), but no more than three quarters of what instances of the whole model can serve on the cluster:
beyond that a policy of whole models could not keep up whatever it does (this holds for OPT-66B alone: 12
instances, 50 instead of 86 requests a second). Deadline five execution times ("a lenient SLO"), one replica
at the start, all counted.

Seeds: the defaults of Keystage's policy were developed on seeds 0 to 4 and the rivals were tuned on 9000 and
up, so the full form uses seeds 100 to 104, the shorter ones seeds from 200 on.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from keystage.bench.paper_arrivals import Floats, Trace, bursty, replayed
from keystage.bench.paper_equal import GRID, Searching
from keystage.bench.paper_models import MODELS, Model
from keystage.bench.paper_world import one_replica_rps, whole_rps

Load = Literal["trace", "cv"]

TRACE_LOAD = 1.5
CV_LOAD = 3.0
MOST_OF_WHOLE_RATIO = 0.75
"""CV cells ask for no more than this part of what whole-model instances serve on the cluster."""
TRACE_SLO = 1.5
CV_SLO = 5.0
CVS = (0.1, 1.0, 2.0, 4.0, 8.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One load of one model.

    Attributes:
        load: `trace` (Figure 6) or `cv` (Figures 7 and 8).
        model: index in Table 1.
        cv: CV of the gaps; of a trace 0.
        duration_s: arrivals end here.
        warm_s: arrivals before this do not count.
    """

    load: Load
    model: int
    cv: float
    duration_s: float
    warm_s: float = 0.0

    @property
    def of(self) -> Model:
        """The model itself."""
        return MODELS[self.model]

    @property
    def group(self) -> str:
        """The cell of the tables: models are pooled."""
        return "trace" if self.load == "trace" else f"cv {self.cv:g}"

    @property
    def slo_ratio(self) -> float:
        """Deadline told to the policies, in execution times."""
        return TRACE_SLO if self.load == "trace" else CV_SLO

    @property
    def rate_rps(self) -> float:
        """Wanted mean rate."""
        if self.load == "trace":
            return TRACE_LOAD * one_replica_rps(self.of)
        return min(CV_LOAD * one_replica_rps(self.of), MOST_OF_WHOLE_RATIO * whole_rps(self.of))


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much of the experiment a form runs.

    Attributes:
        models: indices in Table 1.
        seeds: of arrivals and draws.
        cvs: CVs of Figures 7 and 8.
        trace_s: length of a trace window, warm-up included.
        warm_s: its part that does not count.
        cv_s: seconds of arrivals, by CV.
        evaluations: most efforts tried on all seeds for one policy and cell in Table B.
        grid: efforts tried first, over the tuned one.
        grid_seeds: how many seeds they are tried on.
        has_ablations: whether the ablations run.
    """

    models: tuple[int, ...]
    seeds: tuple[int, ...]
    cvs: tuple[float, ...]
    trace_s: float
    warm_s: float
    cv_s: dict[float, float]
    evaluations: int
    has_ablations: bool
    grid: tuple[float, ...] = GRID
    grid_seeds: int = 2

    @property
    def searching(self) -> Searching:
        """How Table B searches efforts."""
        return Searching(self.seeds, self.evaluations, self.grid, self.grid_seeds)

    def cells(self) -> list[Cell]:
        """All cells, trace first."""
        trace = [Cell("trace", m, 0.0, self.trace_s, self.warm_s) for m in self.models]
        return trace + [Cell("cv", m, cv, self.cv_s[cv]) for cv in self.cvs for m in self.models]


QUICK = Size(
    (1, 4), (200, 201), (8.0,), 60.0, 20.0, {8.0: 40.0}, 2, has_ablations=False, grid=(0.7, 1.0, 1.4),
    grid_seeds=1,
)  # fmt: skip
SHORT = Size(
    (1, 3, 4), (200, 201, 202), (1.0, 8.0), 120.0, 60.0, {1.0: 45.0, 8.0: 90.0}, 7, has_ablations=False,
    grid_seeds=1,
)  # fmt: skip
FULL = Size(
    (0, 1, 2, 3, 4), (100, 101, 102, 103, 104), CVS, 300.0, 120.0,
    {0.1: 60.0, 1.0: 60.0, 2.0: 60.0, 4.0: 60.0, 8.0: 190.0}, 7, has_ablations=True,
)  # fmt: skip
"""At CV 8 the five models have 130,000 arrivals a seed together, above 2,000 CV^2 = 128,000. Budget of a
search: 7 efforts on 2 seeds, at most 7 on all 5."""


def times_s(cell: Cell, trace: Trace, seed: int) -> Floats:
    """Arrivals of a cell under a seed."""
    if cell.load == "trace":
        return replayed(trace, cell.model, cell.rate_rps, cell.duration_s, seed)
    return bursty(cell.rate_rps, cell.cv, round(cell.rate_rps * cell.duration_s), cell.model, seed)

"""Figures 2a, 2b and 3a: BERT-21B in five stages on five A40s, steered by nobody.

Before it: `paper_world.case_study`. After it: one PNG and sentences of `paper`. The paper gives CV (1,
0.1 and 4) and ten minutes, not the rate: 80 % of the slowest stage's without batches is taken, and no
batches, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from keystage.bench import paper_figures
from keystage.bench.paper_arrivals import bursty
from keystage.bench.paper_models import BERT, CASE_STUDY_LAYERS
from keystage.bench.paper_world import case_study
from keystage.simulator.api import PipelineOutcome, World
from keystage.simulator.run import simulate

UTILISATION = 0.8
DURATION_S = 600.0
MODEL_STREAM = 100
"""Arrivals of their own, apart from those of the five models."""


def case_studies(folder: Path, seeds: Sequence[int]) -> list[str]:
    """Runs the three loads, draws the figure, and says what came out.

    Args:
        folder: gets `figure-2-3.png`.
        seeds: of arrivals and draws; values are means over them.
    """
    cvs = _stages(1.0, seeds, lambda p: [s.gap_cv for s in p.stages])
    queues = _stages(0.1, seeds, lambda p: [s.queue_mean for s in p.stages])
    busy = _stages(4.0, seeds, lambda p: [s.busy_ratio for s in p.stages])
    loads = ("arrivals of CV 1", "arrivals of CV 0.1", "arrivals of CV 4")
    paper_figures.draw_case_study(folder / "figure-2-3.png", cvs, queues, busy, loads)
    return [
        (
            f"figure 2a (CV by stage, CV 1 in): {_shown(cvs)}; printed: rising, up to 3.5x between stages. "
            f"Ours {max(cvs) / min(cvs):.2f}x: single servers of nearly constant time smooth a CV of 1"
        ),
        f"figure 2b (queue by stage, CV 0.1 in): {_shown(queues)}; printed: longest 3x the shortest",
        f"figure 3a (busy by stage, CV 4 in): {_shown(busy)}; printed: uneven",
    ]


def _stages(cv: float, seeds: Sequence[int], values: Callable[[PipelineOutcome], list[float]]) -> list[float]:
    """Means over seeds of a value by stage."""
    slowest_s = BERT.exec_s * max(CASE_STUDY_LAYERS) / sum(CASE_STUDY_LAYERS)
    rate_rps = UTILISATION / slowest_s
    found = []
    for seed in seeds:
        world = _without_batches(
            case_study(bursty(rate_rps, cv, round(rate_rps * DURATION_S), MODEL_STREAM, seed))
        )
        found.append(values(simulate(world, None, seed).pipelines[0]))
    return [float(v) for v in np.mean(found, axis=0)]


def _without_batches(world: World) -> World:
    pipeline = world.pipelines[0]
    stages = tuple(msgspec.structs.replace(stage, most=1) for stage in pipeline.stages)
    return msgspec.structs.replace(world, pipelines=(msgspec.structs.replace(pipeline, stages=stages),))


def _shown(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)

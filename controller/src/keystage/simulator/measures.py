"""What a run gave, read from its parts; and the laws every run must obey.

Before it: the parts of a world that has run. After it: `Outcome` for reports, `check` for every test.
"""

from __future__ import annotations

import math

import numpy as np

from keystage.simulator.api import Floats, Outcome, PipelineOutcome, StageOutcome
from keystage.simulator.fleet import Unit

TOLERANCE = 1e-6
"""Relative bound on what sums of seconds lose in rounding."""


class LawError(AssertionError):
    """A run broke a law that holds for every run: the simulator is wrong."""


def stage_outcome(unit: Unit, at_s: float) -> StageOutcome:
    """Measures of one stage, until now."""
    stage, tally = unit.stage, unit.tally
    tally.change(at_s)
    if stage.arrivals != stage.services + stage.in_flight + len(stage.queue) + stage.dropped:
        raise LawError(
            f"{stage.function}: {stage.arrivals} arrived, {stage.services} served, "
            f"{stage.in_flight} in service, {len(stage.queue)} wait, {stage.dropped} were refused"
        )
    busy_s = stage.busy_s + math.fsum(r.busy_s for r in stage.replicas.values())
    return StageOutcome(
        function=stage.function,
        arrivals=stage.arrivals,
        queue_mean=stage.queue_area_item_s(at_s) / at_s if at_s else 0.0,
        wait_mean_s=stage.waited_s(at_s) / stage.arrivals if stage.arrivals else 0.0,
        busy_ratio=busy_s / tally.ready_replica_s if tally.ready_replica_s else 0.0,
        replica_s=tally.replica_s,
        starts=sum(tally.starts.values()),
        starts_by_source=dict(tally.starts),
        gap_cv=_gap_cv(stage.arrivals - 1, stage.last_arrival_s - stage.first_arrival_s, stage.gap_sq_sum_s2),
        series=np.array(tally.series, dtype=np.float64).reshape(-1, 3),
    )


def _gap_cv(gaps: int, sum_s: float, square_sum_s2: float) -> float:
    if gaps < 2 or sum_s <= 0:
        return 0.0
    return math.sqrt(max(0.0, square_sum_s2 * gaps / sum_s / sum_s - 1))


def check(outcome: Outcome) -> None:
    """Little's law at every stage, order and conservation of requests.

    Raises:
        LawError: a law is broken.
    """
    for pipeline in outcome.pipelines:
        latency_s = pipeline.finished_s - pipeline.arrived_s
        if np.any(latency_s < -TOLERANCE):
            raise LawError(
                f"{pipeline.pipeline}: a request finished {-np.nanmin(latency_s)} s before it came"
            )
        if np.any(pipeline.finished_s > outcome.ended_s):
            raise LawError(f"{pipeline.pipeline}: a request finished after the run's end")
        came = int(np.sum(pipeline.arrived_s <= outcome.ended_s))
        finished = int(np.sum(~np.isnan(pipeline.finished_s)))
        for k, stage in enumerate(pipeline.stages):
            is_counted = k == 0 or stage.arrivals > 0  # looping pipelines count at entry only
            if is_counted and not finished <= stage.arrivals <= came:
                raise LawError(
                    f"{stage.function}: {stage.arrivals} items, but {came} came and {finished} left"
                )
            queued_s, waited_s = stage.queue_mean * outcome.ended_s, stage.wait_mean_s * stage.arrivals
            bound_s = TOLERANCE * (1 + max(abs(queued_s), abs(waited_s)) + outcome.ended_s)
            if abs(queued_s - waited_s) > bound_s:
                raise LawError(
                    f"{stage.function}: Little's law: {queued_s} item-seconds in queue, {waited_s} waited"
                )


def pipeline_outcome(
    name: str, arrived_s: Floats, finished_s: Floats, stages: list[StageOutcome], tokens: int
) -> PipelineOutcome:
    """Measures of one pipeline."""
    return PipelineOutcome(
        pipeline=name, arrived_s=arrived_s, finished_s=finished_s, stages=tuple(stages), tokens=tokens
    )

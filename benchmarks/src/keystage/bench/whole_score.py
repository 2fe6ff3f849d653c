"""What came of one pipeline under one policy, live or simulated: the same measures of both.

Before it: `whole_world` or the simulator. After it: tables and figures of `e2e` and `mixed`. As in `bench
paper`: a request without an answer counts in latencies with its age at the end of the run; goodput counts
answers within the objective; GPU-seconds are those of replicas, one GPU each unless a function says more,
starting and draining ones too, within the schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keystage.bench.paper_cells import CV_SLO
from keystage.bench.whole_client import Floats
from keystage.bench.whole_models import Part
from keystage.bench.whole_world import Outcome
from keystage.simulator import api
from keystage.simulator.watch import StagePoint

PERCENTILES = (50, 75, 90, 95, 99)


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """The measures of one run, over all its pipelines.

    Attributes:
        counted: requests.
        unserved: those without an answer.
        mean_s: mean latency.
        slowdown: mean of latency over the stand-alone execution time of its model, which is a fifth of the
            objective: the measure that pools models of unequal times.
        percentiles_s: at `PERCENTILES`.
        goodput_rps: answers a second of schedule within the objective.
        gpu_s: GPU-seconds within the schedule.
        queue: mean waiting requests of a stage.
        starts: replicas started within it.
        schedule_s: its length.
    """

    counted: int
    unserved: int
    mean_s: float
    slowdown: float
    percentiles_s: tuple[float, ...]
    goodput_rps: float
    gpu_s: float
    queue: float
    starts: int

    schedule_s: float

    @property
    def p99_s(self) -> float:
        """99th percentile."""
        return self.percentiles_s[-1]

    @property
    def met_ratio(self) -> float:
        """Part of the requests within the objective; see `goodput_rps`."""
        return self.goodput_rps / self.offered_rps if self.counted else 0.0

    @property
    def offered_rps(self) -> float:
        """Requests a second of schedule."""
        return self.counted / self.schedule_s


def score_of(
    latencies_s: Sequence[Floats],
    ages_s: Sequence[Floats],
    deadlines_s: Sequence[float],
    *,
    duration_s: float,
    gpu_s: float,
    queues: Sequence[float],
    starts: int,
) -> Score:
    """Makes a score.

    Args:
        latencies_s: by pipeline; infinite for requests without an answer.
        ages_s: what counts for these.
        deadlines_s: objective of each pipeline.
        duration_s: length of the schedule.
        gpu_s: GPU-seconds.
        queues: waiting requests, mean by stage or one reading each.
        starts: replicas started.
    """
    met = sum(int((own <= limit).sum()) for own, limit in zip(latencies_s, deadlines_s, strict=True))
    every_s = np.concatenate(
        [np.where(np.isfinite(a), a, b) for a, b in zip(latencies_s, ages_s, strict=True)]
    )
    limits_s = np.concatenate([np.full(len(a), b) for a, b in zip(ages_s, deadlines_s, strict=True)])
    return Score(
        counted=len(every_s),
        unserved=sum(int((~np.isfinite(own)).sum()) for own in latencies_s),
        mean_s=float(every_s.mean()),
        slowdown=float((every_s / (limits_s / CV_SLO)).mean()),
        percentiles_s=tuple(float(v) for v in np.percentile(every_s, PERCENTILES)),
        goodput_rps=met / duration_s,
        gpu_s=gpu_s,
        queue=float(np.mean(queues)) if len(queues) else math.nan,
        starts=starts,
        schedule_s=duration_s,
    )


def live_score(outcome: Outcome) -> Score:
    """Of a run of the real platform."""
    plan = outcome.plan
    last_s = max([plan.duration_s, *(float(s.ended_s.max()) for s in outcome.sent if len(s.ended_s))])
    gpus = sum(
        average * part.gpus
        for served, averages in zip(plan.served, outcome.replicas, strict=True)
        for part, average in zip(served.parts, averages, strict=True)
    )
    return score_of(
        [one.latency_s for one in outcome.sent],
        [last_s - one.scheduled_s for one in outcome.sent],
        [served.deadline_s for served in plan.served],
        duration_s=plan.duration_s,
        gpu_s=gpus * plan.duration_s,
        queues=[queue for one in outcome.sent for queue in one.queues],
        starts=outcome.started,
    )


def simulated_score(
    outcome: api.Outcome,
    points: Sequence[StagePoint],
    parts: Sequence[Sequence[Part]],
    deadlines_s: Sequence[float],
    *,
    warm_s: float,
    duration_s: float,
) -> Score:
    """Of a simulated run; only the schedule counts, which begins after `warm_s`.

    Args:
        outcome: what the simulator gave.
        points: what was seen at each tick (ticks are even).
        parts: functions of each pipeline.
        deadlines_s: objective of each.
        warm_s: where the schedule begins.
        duration_s: its length.
    """
    within = [p for p in points if warm_s <= p.at_s <= warm_s + duration_s]
    ticks = max(1, len({p.at_s for p in within}))
    gpus_of = {
        stage.function: part.gpus
        for pipeline, own in zip(outcome.pipelines, parts, strict=True)
        for stage, part in zip(pipeline.stages, own, strict=True)
    }
    gpus = sum((p.ready + p.starting) * gpus_of[p.function] for p in within) / ticks
    latencies_s, ages_s = [], []
    for pipeline in outcome.pipelines:
        counts = pipeline.arrived_s >= warm_s
        latencies_s.append(pipeline.latency_s[counts])
        ages_s.append(outcome.ended_s - pipeline.arrived_s[counts])
    queues = [p.queue for p in points if p.at_s >= warm_s]
    return score_of(
        latencies_s,
        ages_s,
        deadlines_s,
        duration_s=duration_s,
        gpu_s=gpus * duration_s,
        queues=queues,
        starts=sum(stage.starts for pipeline in outcome.pipelines for stage in pipeline.stages),
    )

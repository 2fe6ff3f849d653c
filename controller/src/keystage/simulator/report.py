"""The report of a simulated run: measures, and what is written to files.

Before it: an `Outcome` and, for plots, what `watch` kept. After it: `table` prints it, `plots` draws it.
Latencies count from the arrival; a request without an answer at the end of the run took for ever: a
percentile that falls on one has no value, and mean and maximum are over answered ones, as in the load
generator. Requests that arrive before the world's `warm_s` are not measured.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from keystage.simulator.api import Outcome, PipelineOutcome, World
from keystage.simulator.watch import StagePoint

REPORT_VERSION = 1
SLO_SCALES = (1.0, 1.5, 2.0, 3.0)


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds; None where a percentile falls on an unanswered request."""

    p50: float | None
    p75: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    max: float | None


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: waits, use and replicas.

    Attributes:
        function: stage function.
        queue_mean: mean waiting items.
        wait_mean_s: mean wait.
        busy_ratio: busy part of ready replicas' time.
        replicas_mean: replica-seconds over the run's length.
        replicas_most: most ready replicas.
        starts: replicas started, by source of parameters.
        gap_cv: CV of the gaps between arrivals.
    """

    function: str
    queue_mean: float
    wait_mean_s: float
    busy_ratio: float
    replicas_mean: float
    replicas_most: int
    starts: dict[str, int]
    gap_cv: float


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """Requests within the deadline times `scale`, and their tokens a second."""

    scale: float
    met_ratio: float
    goodput_tps: float


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline.

    Attributes:
        pipeline: its name.
        arrived: measured requests.
        unanswered: of these, without an answer when the run ended.
        rate_rps: arrivals a second.
        cv: CV of the gaps between them, None below two.
        latency_s: their latencies.
        attainment: by scale of the deadline, empty without one.
        stages: per stage.
    """

    pipeline: str
    arrived: int
    unanswered: int
    rate_rps: float
    cv: float | None
    latency_s: Latencies
    attainment: list[Attainment]
    stages: list[StageReport]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        version: of this form.
        world: its name.
        policy: who steered.
        seed: of every draw.
        ended_s: simulated seconds.
        gpu_s: GPU-seconds (replica-seconds where stages hold no GPU).
        cpu_core_s: core-seconds.
        events: events handled.
        wall_s: seconds on this machine.
        log_sha256: of the event log, empty without one.
        pipelines: per pipeline.
    """

    version: int = REPORT_VERSION
    world: str
    policy: str
    seed: int
    ended_s: float
    gpu_s: float
    cpu_core_s: float
    events: int
    wall_s: float
    log_sha256: str
    pipelines: list[PipelineReport]


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """What plots need beside the report: latencies by arrival, and stages over time."""

    arrived_s: dict[str, tuple[Sequence[float], Sequence[float]]]
    points: Sequence[StagePoint]


def reported(world: World, outcome: Outcome, name: str, policy: str, seed: int) -> Report:
    """The measures of a run."""
    deadlines = {p.name: p.slo.deadline_s for p in world.pipelines}
    return Report(
        world=name,
        policy=policy,
        seed=seed,
        ended_s=outcome.ended_s,
        gpu_s=outcome.gpu_s,
        cpu_core_s=outcome.cpu_core_s,
        events=outcome.events,
        wall_s=outcome.wall_s,
        log_sha256=outcome.log_sha256,
        pipelines=[
            _pipeline(p, outcome.ended_s, world.warm_s, deadlines.get(p.pipeline)) for p in outcome.pipelines
        ],
    )


def _pipeline(
    outcome: PipelineOutcome, ended_s: float, warm_s: float, deadline_s: float | None
) -> PipelineReport:
    is_measured = outcome.arrived_s >= warm_s
    latency_s = outcome.latency_s[is_measured]
    arrived_s = outcome.arrived_s[is_measured]
    gaps = np.diff(arrived_s)
    span_s = max(float(arrived_s[-1]) - warm_s, 1e-9) if len(arrived_s) else 1.0
    scales = SLO_SCALES if deadline_s is not None and len(latency_s) else ()
    met = {scale: int((latency_s <= scale * (deadline_s or 0.0)).sum()) for scale in scales}
    return PipelineReport(
        pipeline=outcome.pipeline,
        arrived=len(latency_s),
        unanswered=int(np.isinf(latency_s).sum()),
        rate_rps=len(latency_s) / span_s,
        cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        latency_s=latencies(latency_s.tolist()),
        attainment=[
            Attainment(scale=s, met_ratio=n / len(latency_s), goodput_tps=outcome.tokens * n / span_s)
            for s, n in met.items()
        ],
        stages=[
            StageReport(
                function=stage.function,
                queue_mean=stage.queue_mean,
                wait_mean_s=stage.wait_mean_s,
                busy_ratio=stage.busy_ratio,
                replicas_mean=stage.replica_s / ended_s if ended_s else 0.0,
                replicas_most=int(stage.series[:, 2].max()) if len(stage.series) else 0,
                starts=stage.starts_by_source,
                gap_cv=stage.gap_cv,
            )
            for stage in outcome.stages
        ],
    )


def latencies(values_s: Sequence[float]) -> Latencies:
    """Nearest-rank percentiles; infinite values are unanswered requests."""
    ordered = sorted(values_s)
    answered = [value for value in ordered if math.isfinite(value)]

    def rank(probability: float) -> float | None:
        place = max(math.ceil(probability * len(ordered)) - 1, 0)
        return answered[place] if place < len(answered) else None

    return Latencies(
        p50=rank(0.5),
        p75=rank(0.75),
        p90=rank(0.9),
        p95=rank(0.95),
        p99=rank(0.99),
        mean=math.fsum(answered) / len(answered) if answered else None,
        max=answered[-1] if answered else None,
    )


def drawn(outcome: Outcome, points: Sequence[StagePoint]) -> Drawn:
    """What plots need: all requests, those of the warm-up too."""
    return Drawn(
        {p.pipeline: (p.arrived_s.tolist(), p.latency_s.tolist()) for p in outcome.pipelines}, points
    )


def write(report: Report, outcome: Outcome, folder: Path) -> list[Path]:
    """Writes `report.json` and `requests.csv` and returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.json", folder / "requests.csv"]
    paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    with paths[1].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("pipeline", "arrived_s", "latency_s"))
        for pipeline in outcome.pipelines:
            for at_s, latency_s in zip(pipeline.arrived_s.tolist(), pipeline.latency_s.tolist(), strict=True):
                shown = f"{latency_s:.9g}" if math.isfinite(latency_s) else ""
                writer.writerow((pipeline.pipeline, f"{at_s:.9g}", shown))
    return paths

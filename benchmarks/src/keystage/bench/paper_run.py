"""Runs cells in worker processes and keeps what the tables need of each.

Before it: `paper_cells`, `paper_policies`, `paper_world`. After it: `paper_equal`, `paper_tables`,
`paper_figures`. A run is named by plain data, so that it can be sent to a process and done again.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from keystage.bench.paper_arrivals import Trace, achieved_cv, load_trace
from keystage.bench.paper_cells import Cell, times_s
from keystage.bench.paper_models import MODELS
from keystage.bench.paper_policies import Changes, Traffic, policy
from keystage.bench.paper_world import Table, paper_world
from keystage.simulator.api import Outcome
from keystage.simulator.run import simulate

PERCENTILES = (50, 75, 90, 95, 99)
SLO_RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 5.0)
TELL_EVERY_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One cell under one policy and seed.

    Attributes:
        cell: the load.
        policy: name, see `paper_policies`.
        table: A or B.
        seed: of arrivals and draws.
        effort: the policy's knob.
        changes: settings changed, as (path, value) pairs.
        traces: folder of traces, None for the usual place.
    """

    cell: Cell
    policy: str
    table: Table
    seed: int
    effort: float = 1.0
    changes: tuple[tuple[str, object], ...] = ()
    traces: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """What came of a run.

    Attributes:
        run: the run.
        counted: requests that count.
        unserved: of these, how many had no answer when the run ended.
        mean_s: mean latency; an unserved request counts with its age at the end of the run.
        percentiles_s: latencies at `PERCENTILES`.
        goodput_tps: tokens a second of responses within `SLO_RATIOS` execution times.
        met_ratios: part of the requests within them.
        queue: mean waiting requests of a stage.
        gpu_s: GPU-seconds from the start of the run to its end.
        starts: replicas started, by source of parameters.
        stage_queues: mean waiting requests by stage.
        stage_busy: busy part of ready replicas' time by stage.
        stage_cvs: CV of arrivals by stage.
        events: events of the simulator.
        wall_s: seconds it took.
        achieved_cv: CV of the arrivals' gaps.
    """

    run: Run
    counted: int
    unserved: int
    mean_s: float
    percentiles_s: tuple[float, ...]
    goodput_tps: tuple[float, ...]
    met_ratios: tuple[float, ...]
    queue: float
    gpu_s: float
    starts: dict[str, int]
    stage_queues: tuple[float, ...]
    stage_busy: tuple[float, ...]
    stage_cvs: tuple[float, ...]
    events: int
    wall_s: float
    achieved_cv: float

    def percentile_s(self, rank: int) -> float:
        """Latency at one of `PERCENTILES`."""
        return self.percentiles_s[PERCENTILES.index(rank)]

    def goodput(self, slo_ratio: float) -> float:
        """Tokens a second within one of `SLO_RATIOS`; nothing at all counts as half a response.

        A ratio to nothing would be infinite and could not be averaged.
        """
        span_s = self.run.cell.duration_s - self.run.cell.warm_s
        return max(self.goodput_tps[SLO_RATIOS.index(slo_ratio)], 0.5 * self.run.cell.of.tokens / span_s)


def perform(run: Run) -> Score:
    """Simulates one run."""
    begun_s = time.perf_counter()
    cell = run.cell
    steered = policy(run.policy, dict(run.changes))
    arrivals_s = times_s(cell, _trace(run.traces), run.seed)
    world = paper_world(cell.of, arrivals_s, cell.slo_ratio, steered.terms(run.table), cell.warm_s)
    cv = achieved_cv(arrivals_s)
    span_s = max(float(arrivals_s[-1]), 1e-9)
    traffic = Traffic(world.pipelines[0].name, len(arrivals_s) / span_s, cv)
    outcome = simulate(world, steered.make(run.effort, traffic), run.seed)
    return scored(run, outcome, time.perf_counter() - begun_s, cv)


def scored(run: Run, outcome: Outcome, wall_s: float, cv: float) -> Score:
    """The measures of an outcome of one pipeline."""
    cell, pipeline = run.cell, outcome.pipelines[0]
    counts = pipeline.arrived_s >= cell.warm_s
    latency_s = pipeline.latency_s[counts]
    is_served = np.isfinite(latency_s)
    aged_s = np.where(is_served, latency_s, outcome.ended_s - pipeline.arrived_s[counts])
    met = [int((latency_s <= ratio * cell.of.exec_s).sum()) for ratio in SLO_RATIOS]
    span_s = cell.duration_s - cell.warm_s
    starts: dict[str, int] = {}
    for stage in pipeline.stages:
        for source, number in stage.starts_by_source.items():
            starts[source] = starts.get(source, 0) + number
    return Score(
        run=run,
        counted=len(latency_s),
        unserved=int((~is_served).sum()),
        mean_s=float(aged_s.mean()),
        percentiles_s=tuple(float(v) for v in np.percentile(aged_s, PERCENTILES)),
        goodput_tps=tuple(cell.of.tokens * n / span_s for n in met),
        met_ratios=tuple(n / len(latency_s) for n in met),
        queue=float(np.mean([stage.queue_mean for stage in pipeline.stages])),
        gpu_s=outcome.gpu_s,
        starts=starts,
        stage_queues=tuple(stage.queue_mean for stage in pipeline.stages),
        stage_busy=tuple(stage.busy_ratio for stage in pipeline.stages),
        stage_cvs=tuple(stage.gap_cv for stage in pipeline.stages),
        events=outcome.events,
        wall_s=wall_s,
        achieved_cv=cv,
    )


class Pool:
    """Worker processes for runs; a context.

    Args:
        processes: how many.
    """

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        self.wall_s = 0.0
        self.events = 0
        self.runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def perform(self, runs: Sequence[Run], what: str) -> list[Score]:
        """Performs runs, the long ones first, and tells how it goes; answers in the given order."""
        order = sorted(range(len(runs)), key=lambda i: -runs[i].cell.rate_rps * runs[i].cell.duration_s)
        done = self._told(self._pool.map(perform, [runs[i] for i in order]), len(runs), what)
        by_place = dict(zip(order, done, strict=True))
        return [by_place[i] for i in range(len(runs))]

    def _told(self, scores: Iterable[Score], total: int, what: str) -> list[Score]:
        begun_s = told_s = time.monotonic()
        kept: list[Score] = []
        for score in scores:
            kept.append(score)
            self.wall_s += score.wall_s
            self.events += score.events
            self.runs += 1
            now_s = time.monotonic()
            if now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                print(f"{what}: {len(kept)} of {total} runs, {now_s - begun_s:.0f} s", file=sys.stderr)
        return kept


def changes(values: Changes) -> tuple[tuple[str, object], ...]:
    """Settings changed, as a run carries them."""
    return tuple(sorted(values.items()))


@functools.cache
def _trace(traces: Path | None) -> Trace:
    return load_trace(len(MODELS), traces)

"""`keystage bench soak`: an hour of the trace at 10x through the real platform, 8 hours at 100x simulated.

Live: the 2019 sample of 100 functions dealt to three pipelines, through the gateway, Keystage's controller
steering, devices emulated; 6 minutes of wall time, or `--seconds` (1800: half an hour). Every request is
accounted for (sent = served + refused by reason + failed by class, and the routers' own counts beside it),
latency and lag are followed by the minute, and memory, shared memory, open files and threads of every process
are sampled: slopes with intervals (`soak_trend`).
Simulated: the sample of 500 functions, all 8 hours, on a pool of thousands of GPUs.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from keystage.bench import soak_figures
from keystage.bench.config import BenchSettings
from keystage.bench.frame import BenchError, BenchResult, Figure
from keystage.bench.machine_use import MachineUse
from keystage.bench.mixed_cells import (
    LIVE_MODELS,
    SIMULATED_MODELS,
    Cell,
    Load,
    live_plan,
    servers,
    simulated_world,
)
from keystage.bench.paper_policies import OURS
from keystage.bench.paper_world import GPUS
from keystage.bench.results_page import write_page
from keystage.bench.soak_trend import LEVEL, Trend, by_role, processes, trend
from keystage.bench.whole_client import Floats, Sent
from keystage.bench.whole_faults import accounted, faults_of
from keystage.bench.whole_models import described
from keystage.bench.whole_partial import finished, keep
from keystage.bench.whole_trace import load
from keystage.bench.whole_watch import COLUMNS as PROCESS_COLUMNS
from keystage.bench.whole_world import Outcome, measure
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.steering import Keystage
from keystage.simulator import api
from keystage.simulator.measures import LawError, check
from keystage.simulator.run import simulate

SPEED = 10.0
SECONDS = 360.0
QUICK_SECONDS = 24.0
SIMULATED_SPEED = 100.0
MINUTES = 480
QUICK_MINUTES = 20
SEED = 320
SAMPLES = 120
"""Of all processes over a run."""
LEAST_EVERY_S = 1.0
COLUMNS = "sent served refused failed unaccounted level per_hour low high verdict"
_MIB = float(1 << 20)


def run(
    *, quick: bool = False, seconds: float | None = None, speed: float | None = None, out: Path = Path("out")
) -> BenchResult:
    """Runs both parts.

    Args:
        quick: 24 s live, 20 minutes simulated: a look that can tell no trend.
        seconds: wall time of the live part, 360 by default.
        speed: of the trace in the live part, 10 by default.
        out: pictures, and a row for each look at a process, go to its folder `soak`.

    Raises:
        BenchError: the trace is shorter than seconds times speed.
        PaperTraceError: a traces folder was named that cannot be used.
        WholeError: the platform did not do what a run needs.
    """
    speed = SPEED if speed is None else speed
    seconds = (QUICK_SECONDS if quick else SECONDS) if seconds is None else seconds
    minutes = round(seconds * speed / 60)
    if not 1 <= minutes <= MINUTES:
        raise BenchError(
            f"{seconds:g} s at {speed:g}x are {seconds * speed / 60:g} minutes of a trace that has 1 to "
            f"{MINUTES}"
        )
    traces = BenchSettings().trace_folder
    small, large = load(100, traces), load(500, traces)
    use = MachineUse()
    one = Load(Cell(100, LIVE_MODELS, 0, minutes, speed, SEED), small)
    plan = live_plan(one, OURS)
    every_s = max(LEAST_EVERY_S, plan.duration_s / SAMPLES)
    outcome = measure(dataclasses.replace(plan, processes_every_s=every_s))
    disturbance = use.disturbance()
    print(f"live: {sum(len(s.scheduled_s) for s in outcome.sent)} requests sent", file=sys.stderr)
    trends = live_trends(outcome)
    live = BenchResult(
        [*account_rows(outcome), *trend_rows("live", trends, 3600.0)],
        _live_figures(outcome, trends),
        [f"FAILED: {text}" for text in faults_of(outcome)],
        disturbance,
    )
    keep("soak", live, out, "the simulated part is missing")
    big = Load(
        Cell(500, SIMULATED_MODELS, 0, QUICK_MINUTES if quick else MINUTES, SIMULATED_SPEED, SEED), large
    )
    simulated, memory, wall_s, broken = _simulate(big)
    sim_trends = _simulated_trends(simulated, memory, big.cell.duration_s)
    folder = out / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    names = ",".join(PROCESS_COLUMNS)
    np.savetxt(folder / "processes.csv", outcome.processes, "%.10g", ",", header=names, comments="")
    pictures = [
        soak_figures.draw_live(folder / "soak-live.png", outcome, trends),
        soak_figures.draw_simulated(folder / "soak-simulated.png", simulated, memory),
    ]
    sent = list(outcome.sent)
    faults = [*faults_of(outcome), *broken]
    notes = [
        *(f"FAILED: {text}" for text in faults),
        (
            f"live: {small.source}, minutes 0 to {minutes} at {speed:g}x, {outcome.plan.duration_s:.0f} s, "
            f"{sum(len(s.scheduled_s) for s in sent)} requests through the gateway to "
            f"{described(LIVE_MODELS)}; devices emulated, the rest real; {outcome.started} replicas started, "
            f"at most {outcome.most_replicas} at once; {outcome.used_cores:.2f} cores busy, the client's "
            "included"
        ),
        (
            "trends: least squares through 12 blocks of the last three quarters, 95 % Student intervals; "
            "memory is resident and not shared, summed over the processes of a role that lived through that "
            f"part; the supervisor's holds this benchmark's own; samples every {every_s:.1f} s; slopes of "
            "processes are those at an equal number of processes, the second regressor: who is connected to "
            "all of them has more files when the trace wants more; those of memory also at an equal greatest "
            "number so far, the third: not all that a burst needed goes back to the system"
        ),
        (
            f"simulated: {large.source}, {big.cell.minutes} minutes at {SIMULATED_SPEED:g}x, pool of "
            f"{servers(big) * GPUS} GPUs, {described(SIMULATED_MODELS)}; {simulated.events:,} events in "
            f"{wall_s:.0f} s; Little's law, order and conservation are checked at every stage"
        ),
        accounted([outcome]),
        f"pictures: {', '.join(map(str, pictures))}",
    ]
    result = BenchResult(
        [*account_rows(outcome), *_simulated_rows(simulated, big), *trend_rows("live", trends, 3600.0),
         *trend_rows("simulated", sim_trends, 3600.0)],
        _figures(outcome, trends, simulated, sim_trends),
        notes,
        disturbance,
    )  # fmt: skip
    result = finished("soak", result, out, [])
    if not quick:
        write_page("soak", "Soak", result)
    return result


def live_trends(outcome: Outcome) -> dict[str, Trend]:
    """Trends of latency, lag, and of what processes hold."""
    duration_s = outcome.plan.duration_s
    found: dict[str, Trend] = {}
    for served, sent in zip(outcome.plan.served, outcome.sent, strict=True):
        found[f"latency {served.name} (ms)"] = trend(
            sent.scheduled_s, 1e3 * sent.latency_s, duration_s, is_median=True
        )
    at_s, lag_s = joined(outcome.sent)
    least_ms = min(one.level for one in found.values())  # of the latencies, which lag is counted in
    found["send lag (ms)"] = trend(at_s, 1e3 * lag_s, duration_s, is_median=True, part_of=least_ms)
    for column, name, unit in (
        ("private_bytes", "memory {} (MiB)", _MIB),
        ("shared_bytes", "shared memory {} (MiB)", _MIB),
        ("files", "files {}", 1.0),
        ("threads", "threads {}", 1.0),
    ):
        for role, (times_s, sums, number) in by_role(outcome.processes, column, duration_s).items():
            label = name.format(role if number == 1 else f"{number} x {role}")
            number_now, most_so_far = processes(outcome.processes, times_s)
            loads = (number_now, most_so_far) if column == "private_bytes" else (number_now,)
            found[label] = trend(times_s, sums / unit, duration_s, loads=loads)
    return found


def joined(sent: Sequence[Sent]) -> tuple[Floats, Floats]:
    """Scheduled times and lags of all pipelines."""
    return np.concatenate([s.scheduled_s for s in sent]), np.concatenate([s.lag_s for s in sent])


def _row(part: str, what: str, **values: object) -> dict[str, Any]:
    return {"part": part, "what": what, **{name: values.get(name, "") for name in COLUMNS.split()}}


def account_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """What became of every request, by pipeline."""
    return [
        _row(
            "live",
            served.name,
            sent=len(sent.scheduled_s),
            served=int(sent.is_served.sum()),
            refused=sum(sent.refused.values()),
            failed=sum(sent.failed.values()),
            unaccounted=sent.unaccounted,
            verdict=f"router: {sent.router.accepted} taken, {sent.router.completed} completed, refused "
            f"{dict(sent.router.refused) or 'none'}; client: "
            f"{({**sent.refused, **sent.failed}) or 'all served'}",
        )
        for served, sent in zip(outcome.plan.served, outcome.sent, strict=True)
    ]


def trend_rows(part: str, trends: dict[str, Trend], hour_s: float) -> list[dict[str, Any]]:
    """A row a trend, slopes an hour."""
    return [
        _row(
            part,
            what,
            level=one.level,
            per_hour=hour_s * one.slope,
            low=hour_s * one.low,
            high=hour_s * one.high,
            verdict=one.verdict,
        )
        for what, one in trends.items()
    ]


# ---------------------------------------------------------------- simulated


def _simulate(big: Load) -> tuple[api.Outcome, Floats, float, list[str]]:
    """The outcome, this process's memory over simulated time [n, 2], seconds it took, and laws it broke."""
    memory: list[tuple[float, float]] = []
    own = psutil.Process()
    step_s = big.cell.duration_s / SAMPLES

    def told(now_s: float) -> None:
        if now_s >= step_s * len(memory):
            memory.append((now_s, float(own.memory_info().rss)))

    world = simulated_world(big, OURS)
    begun_s = time.monotonic()
    outcome = simulate(world, Keystage(PolicySettings()), SEED, progress=told)
    broken = []
    try:
        check(outcome)
    except LawError as error:
        broken.append(f"the simulator broke a law: {error}")
    return outcome, np.array(memory), time.monotonic() - begun_s, broken


def _simulated_rows(outcome: api.Outcome, big: Load) -> list[dict[str, Any]]:
    rows = []
    for pipeline, times_s in zip(outcome.pipelines, big.times_s, strict=True):
        served = int(np.isfinite(pipeline.finished_s).sum())
        rows.append(
            _row(
                "simulated",
                pipeline.pipeline,
                sent=len(times_s),
                served=served,
                refused=0,
                failed=len(pipeline.arrived_s) - served,
                unaccounted=len(times_s) - len(pipeline.arrived_s),
                verdict="unserved at the end counts as failed",
            )
        )
    return rows


def _simulated_trends(outcome: api.Outcome, memory: Floats, duration_s: float) -> dict[str, Trend]:
    found = {
        f"latency {p.pipeline} (ms)": trend(p.arrived_s, 1e3 * p.latency_s, duration_s, is_median=True)
        for p in outcome.pipelines
    }
    found["memory simulator (MiB)"] = trend(memory[:, 0], memory[:, 1] / _MIB, duration_s)
    return found


def _live_figures(outcome: Outcome, trends: dict[str, Trend]) -> dict[str, Figure]:
    sent = outcome.sent
    number = sum(len(s.scheduled_s) for s in sent)
    served = sum(int(s.is_served.sum()) for s in sent)
    lag_s = joined(sent)[1]
    memory = [one for name, one in trends.items() if name.startswith("memory")]
    lost = sum(s.unaccounted for s in sent)
    per_hour = [3600 * sum(one.slope for one in memory)]
    return {
        "unaccounted": Figure([lost], "live requests without an end that is known", "0"),
        "served_ratio": Figure([served / max(1, number)], "of all requests sent live"),
        "lag_p99_ms": Figure([1e3 * float(np.percentile(lag_s, 99))], "how late the client sent"),
        "memory_mib_per_h": Figure(per_hour, "slope of all lasting processes' memory, live", "about 0"),
    }


def _figures(
    outcome: Outcome, trends: dict[str, Trend], simulated: api.Outcome, sim_trends: dict[str, Trend]
) -> dict[str, Figure]:
    rest = sum(int(np.isnan(p.finished_s).sum()) for p in simulated.pipelines)
    every = {**trends, **{f"simulated {name}": one for name, one in sim_trends.items()}}
    growing = [name for name, one in every.items() if one.is_growing]
    rising, alone = (
        [f"{name} by {one.growth_ratio:.2%}" for name, one in trends.items() if one.rises_among(count)]
        for count in (len(trends), 1)
    )
    by_chance = (1 - LEVEL) / 2 * sum(one.error > 0 for one in trends.values())
    return {
        **_live_figures(outcome, trends),
        "growing": Figure([len(growing)], f"what grows: {', '.join(growing) or 'nothing'}", "0"),
        "rising": Figure(
            [len(rising)],
            f"live slopes above 0, all told together, with their growth: {', '.join(rising) or 'none'}",
            "0",
        ),
        "rising_alone": Figure(
            [len(alone)],
            f"live slopes whose own 95 % interval lies above 0: {', '.join(alone) or 'none'}",
            f"{by_chance:.1f} by chance",
        ),
        "simulated_unserved": Figure([rest], "simulated requests without an answer at the end", "0"),
    }

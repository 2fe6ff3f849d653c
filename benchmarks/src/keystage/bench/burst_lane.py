"""One lane of `keystage bench burst`: a world of its own with some pipelines, each under its arrivals.

Before it: `burst` says which runs. After it: `burst` compares their outcomes. A lane is a process
with a supervisor, perhaps a controller, and one pipeline per run; the open-loop client is another
process, so that starting replicas never delays a request. It must not compare or judge.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from keystage.bench.machine_use import used_s_of_all
from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.loadgen.arrivals import synthetic
from keystage.loadgen.sender import client, send_all
from keystage.loadgen.target import Target
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

BODY_BYTES = 256
READY_S = 120.0
ANSWER_S = 300.0
SAMPLE_S = 0.05
LEAD_S = 1.0
"""From the order to the client until the first arrival: its process has to start."""
WARM_UP_REQUESTS = 10
WARM_UP_GAP_S = 0.15
"""Slower than any stage, so that no queue asks for replicas before the schedule begins."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One pipeline under one list of arrivals.

    Attributes:
        position: the slow stage.
        seed: seed of the arrivals.
        services_s: service time of every stage.
        rate_rps: arrivals per second.
        cv: their coefficient of variation.
        duration_s: length of the schedule; the last arrival is at its end.
        replicas: of every stage, None to let the controller decide.
    """

    position: int
    seed: int
    services_s: tuple[float, ...]
    rate_rps: float
    cv: float
    duration_s: float
    replicas: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return f"burst-{self.position}-{self.seed}"

    def arrivals_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """When requests are sent: the same for every policy."""
        return np.asarray(synthetic(self.rate_rps, self.cv, self.duration_s, self.seed))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave.

    Attributes:
        run: the run.
        latencies_s: from the scheduled time to the whole answer, in schedule order.
        failed: requests without a good answer.
        lag_s: mean delay of sending.
        replicas: time-averaged processes per stage (starting and draining ones too) within the schedule.
        key_ratio: part of the schedule in which the published key-stage list began with the slow stage.
        decisions: changes of a desired number.
        cold_starts: replicas started within the schedule.
        start_s: their times from start to ready.
        used_s: processor time of the lane's processes over the schedule, in all runs of the lane.
    """

    run: Run
    latencies_s: list[float]
    failed: int
    lag_s: float
    replicas: tuple[float, ...] = ()
    key_ratio: float = 0.0
    decisions: int = 0
    cold_starts: int = 0
    start_s: tuple[float, ...] = ()
    used_s: float = 0.0


def measure(runs: Sequence[Run], *, one_by_one: bool = False) -> list[Outcome]:
    """Runs a lane to its end: all its runs at the same time.

    Args:
        runs: what to run.
        one_by_one: deploys a stage when the one before is ready. All at once, the first replicas start
            beside each other on few cores, and the controller learns several times the start time that a
            further replica will take.
    """
    return asyncio.run(_measure(runs, one_by_one=one_by_one))


async def _measure(runs: Sequence[Run], *, one_by_one: bool) -> list[Outcome]:
    is_controlled = runs[0].replicas is None
    with tempfile.TemporaryDirectory(prefix="keystage-burst-") as folder:
        home = Path(folder) / "home"
        async with LocalWorld(home, gateway_port=None, controller=is_controlled) as world:
            for run in runs:
                await _deploy(world, Path(folder), run, one_by_one=one_by_one)
            urls = [await _ready(world, run) for run in runs]
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, _warm_up, urls)
                return await _observe(world, home, runs, urls, pool)


async def _deploy(world: LocalWorld, folder: Path, run: Run, *, one_by_one: bool) -> None:
    pipeline = emulated(run.name, len(run.services_s), execution="single-pass", activation_bytes=BODY_BYTES)
    bundle = folder / run.name
    bundle.mkdir()
    write(bundle, pipeline)
    devices = [f"emulated:alpha={service_s / 2},beta={service_s / 2}" for service_s in run.services_s]
    env = {"KEYSTAGE_MAX_BATCH": "1", "KEYSTAGE_QUEUE_ITEMS": "100000", "KEYSTAGE_RING_BYTES": str(4 << 20)}
    deployments = deployments_for(bundle, pipeline, device=devices, env=env)
    for deployment in deployments if one_by_one else ():
        await world.deploy(deployment)
        await world.wait_ready(deployment.service, 1, READY_S)
    if not one_by_one:
        await world.deploy(*deployments)
    if run.replicas is not None:
        for stage, replicas in enumerate(run.replicas):
            await world.scale(f"{run.name}-stage-{stage}", replicas)


async def _ready(world: LocalWorld, run: Run) -> str:
    """Address of the router once everything serves."""
    for stage in range(len(run.services_s)):
        wanted = 1 if run.replicas is None else run.replicas[stage]
        await world.wait_ready(f"{run.name}-stage-{stage}", wanted, READY_S)
    return f"http://{(await world.wait_ready(run.name, 1, READY_S))[0].address}"


async def _observe(
    world: LocalWorld, home: Path, runs: Sequence[Run], urls: Sequence[str], pool: ProcessPoolExecutor
) -> list[Outcome]:
    """Lets the client send, and watches replicas and key-stage lists meanwhile."""
    start_s = time.monotonic() + LEAD_S
    sending = asyncio.get_running_loop().run_in_executor(pool, _send, runs, urls, start_s)
    await asyncio.sleep(start_s - time.monotonic())
    watches = [_Watch(run, world) for run in runs]
    used_s = -used_s_of_all()
    at_s, last_s = start_s, start_s + max(run.duration_s for run in runs)
    while at_s < last_s:
        await asyncio.sleep(SAMPLE_S)
        now_s = min(time.monotonic(), last_s)
        lists = _key_stages(home)
        for watch in watches:
            watch.sample(now_s - at_s, lists.get(watch.run.name))
        at_s = now_s
    used_s += used_s_of_all()
    sent = await sending
    return [
        dataclasses.replace(
            watch.outcome(), latencies_s=latencies_s, failed=failed, lag_s=lag_s, used_s=used_s
        )
        for watch, (latencies_s, failed, lag_s) in zip(watches, sent, strict=True)
    ]


class _Watch:
    """Integrates over time what one pipeline's replicas and key-stage list are."""

    def __init__(self, run: Run, world: LocalWorld) -> None:
        self.run = run
        self._world = world
        self._functions = [f"{run.name}-stage-{stage}" for stage in range(len(run.services_s))]
        self._replica_s = [0.0] * len(self._functions)
        self._elapsed_s = self._key_s = 0.0
        self._seen = {r.replica: 0.0 for name in self._functions for r in world.replicas(name)}
        self._initial = set(self._seen)
        self._desired = [world.function(name).desired for name in self._functions]
        self._decisions = 0

    def sample(self, dt_s: float, first: int | None) -> None:
        """Adds the last `dt_s` seconds."""
        self._elapsed_s += dt_s
        self._key_s += dt_s if first == self.run.position else 0.0
        for stage, name in enumerate(self._functions):
            records = [r for r in self._world.replicas(name) if r.state not in ("failed", "stopped")]
            self._replica_s[stage] += dt_s * len(records)
            for record in records:
                took_s = record.ready_at_s - record.started_at_s if record.ready_at_s else 0.0
                self._seen[record.replica] = max(took_s, self._seen.get(record.replica, 0.0))
            desired = self._world.function(name).desired
            if desired != self._desired[stage]:
                is_first = self._desired[stage] is None and desired == 1
                self._decisions += not is_first
                self._desired[stage] = desired

    def outcome(self) -> Outcome:
        """The averages."""
        started = {name: took_s for name, took_s in self._seen.items() if name not in self._initial}
        return Outcome(
            run=self.run,
            latencies_s=[],
            failed=0,
            lag_s=0.0,
            replicas=tuple(total / self._elapsed_s for total in self._replica_s),
            key_ratio=self._key_s / self._elapsed_s,
            decisions=self._decisions,
            cold_starts=len(started),
            start_s=tuple(took_s for took_s in started.values() if took_s),
        )


def _key_stages(home: Path) -> dict[str, int]:
    """First stage of every pipeline's published list; none before the controller's first one."""
    path = home / "key-stages.json"
    if not path.exists():
        return {}
    lists = msgspec.json.decode(path.read_bytes(), type=dict[str, list[dict[str, float]]])
    return {name: int(ranking[0]["stage"]) for name, ranking in lists.items() if ranking}


# ---------------------------------------------------------------- client process


def _warm_up(urls: Sequence[str]) -> None:
    uvloop.run(_warm_up_all(urls))


async def _warm_up_all(urls: Sequence[str]) -> None:
    times_s = [WARM_UP_GAP_S * i for i in range(WARM_UP_REQUESTS)]
    async with client(ANSWER_S) as session:
        bodies = [b"x" * BODY_BYTES] * len(times_s)
        await asyncio.gather(*(send_all(session, Target("raw", url), times_s, bodies) for url in urls))


def _send(runs: Sequence[Run], urls: Sequence[str], start_s: float) -> list[tuple[list[float], int, float]]:
    return uvloop.run(_send_runs(runs, urls, start_s))


async def _send_runs(
    runs: Sequence[Run], urls: Sequence[str], start_s: float
) -> list[tuple[list[float], int, float]]:
    """Latencies, failures and mean lag of every run; `time.monotonic` is one clock for all processes."""
    async with client(ANSWER_S) as session:
        times = [run.arrivals_s().tolist() for run in runs]
        sent = await asyncio.gather(
            *(
                send_all(
                    session, Target("raw", url), times_s, [b"x" * BODY_BYTES] * len(times_s), start_s=start_s
                )
                for url, times_s in zip(urls, times, strict=True)
            )
        )
    return [
        (
            [row.last_s - row.scheduled_s for row in rows if row.is_served],
            sum(not row.is_served for row in rows),
            float(np.mean([row.sent_s - row.scheduled_s for row in rows])),
        )
        for rows in sent
    ]

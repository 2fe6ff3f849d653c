"""The live side of `keystage bench deferred`: a pipeline for each batching, all in one local world.

Before it: `deferred` says what is served and which batchings compete. After it: `deferred` searches for
their goodput. Every router, worker and HTTP call is real; only emulated devices sleep instead of computing.
Pipelines that are not asked for anything take no time, so that the batchings are measured one after the
other in one world. The client is a process of its own. It must not compare or judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import uvloop

from keystage.bench.world_logs import telling_why
from keystage.bundle.api import Pipeline
from keystage.bundle.store import write
from keystage.loadgen.arrivals import synthetic
from keystage.loadgen.sender import KEEP_ALIVE_S, send_all
from keystage.loadgen.target import Target
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.router.api import RouterStats
from keystage.wire.descriptors import raise_descriptors

READY_S = 300.0
LEAD_S = 0.5
ANSWER_S = 60.0
WARM_BODIES = 6
"""Requests at once, so that the first fit has several batch sizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What a world serves, the same for every batching.

    Attributes:
        bundle: folder with pipeline.json and parameters; None: `pipeline` is emulated and is written.
        pipeline: its description.
        devices: of each stage.
        workers: of each stage.
        slo_s: deadline that every request brings.
        kind: how it is asked.
        bodies: request bodies, drawn by seed.
    """

    bundle: Path | None
    pipeline: Pipeline
    devices: tuple[str, ...]
    workers: int
    slo_s: float
    kind: str
    bodies: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """One run against one pipeline.

    Attributes:
        rate_rps: arrivals a second.
        cv: coefficient of variation of their gaps.
        seconds: length of the schedule.
        warm_s: arrivals before this are not counted.
        seed: of arrivals and bodies.
    """

    rate_rps: float
    cv: float
    seconds: float
    warm_s: float
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one run gave.

    Attributes:
        good_ratio: answered well within the deadline, of those counted.
        batch: mean size of a batch of the first stage.
        idle_ratio: part of their time that its replicas had nothing.
        lag_s: mean delay of sending: the client's own lateness, counted as latency.
        missed: requests that were not good, by what became of them.
    """

    good_ratio: float
    batch: float
    idle_ratio: float
    lag_s: float
    missed: Mapping[str, int]


class DeferredWorld:
    """Pipelines that are up, by batching.

    Args:
        served: what each serves.
        urls: of their routers.
        session: for their statistics.
        pool: the client's process.
    """

    def __init__(
        self,
        served: Served,
        urls: Mapping[str, str],
        session: aiohttp.ClientSession,
        pool: ProcessPoolExecutor,
    ) -> None:
        self._served = served
        self._urls = urls
        self._session = session
        self._pool = pool

    async def run(self, batching: str, load: Load) -> Run:
        """Sends one load to the pipeline of one batching."""
        url = self._urls[batching]
        before = await self._stats(url)
        sent = asyncio.get_running_loop().run_in_executor(self._pool, _send, self._served, url, load)
        latencies_s, missed, lag_s = await sent
        after = await self._stats(url)
        counted = len(latencies_s) + sum(missed.values())
        good = sum(latency_s <= self._served.slo_s for latency_s in latencies_s)
        late = len(latencies_s) - good
        return Run(
            good / counted if counted else 0.0,
            _mean_batch(before, after),
            _idle_ratio(before, after),
            lag_s,
            {**missed, **({"late": late} if late else {})},
        )

    async def _stats(self, url: str) -> RouterStats:
        async with self._session.get(f"{url}/_/stats") as answer:
            return msgspec.json.decode(await answer.read(), type=RouterStats)


@contextlib.asynccontextmanager
async def opened(served: Served, batchings: Sequence[str]) -> AsyncIterator[DeferredWorld]:
    """Brings one pipeline up for each batching; each has answered some requests when it is there."""
    with tempfile.TemporaryDirectory(prefix="keystage-deferred-") as folder:
        home = Path(folder)
        with telling_why(home / "home"):
            async with LocalWorld(home / "home", gateway_port=None, controller=False) as world:
                urls: dict[str, str] = {}
                for place, batching in enumerate(batchings):
                    urls[batching] = await _deploy(world, home, served, batching, f"d{place}")
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    async with aiohttp.ClientSession() as session:
                        opened_world = DeferredWorld(served, urls, session, pool)
                        for batching, url in urls.items():
                            await asyncio.gather(*(_ask(session, served, url) for _ in range(WARM_BODIES)))
                            await opened_world.run(batching, Load(20.0, 1.0, 1.0, 0.0, 1))
                        yield opened_world


async def _deploy(world: LocalWorld, home: Path, served: Served, batching: str, name: str) -> str:
    """Deploys the pipeline under a name of its own; returns its router's address."""
    pipeline = msgspec.structs.replace(served.pipeline, name=name)
    bundle = home / name
    bundle.mkdir()
    if served.bundle is not None:
        for file in served.bundle.iterdir():
            if file.name != "pipeline.json":
                (bundle / file.name).symlink_to(file)
    write(bundle, pipeline)
    env = {"KEYSTAGE_BATCHING": batching, "KEYSTAGE_LATE": "refuse", "KEYSTAGE_QUEUE_ITEMS": "100000"}
    await world.deploy(*deployments_for(bundle, pipeline, device=served.devices, env=env))
    for stage in pipeline.stages:
        await world.scale(f"{name}-stage-{stage.index}", served.workers)
    for stage in pipeline.stages:
        await world.wait_ready(f"{name}-stage-{stage.index}", served.workers, READY_S)
    return f"http://{(await world.wait_ready(name, 1, READY_S))[0].address}"


def _target(served: Served, url: str) -> Target:
    if served.kind == "raw":
        return Target("raw", url)
    return Target("embeddings", url)


async def _ask(session: aiohttp.ClientSession, served: Served, url: str) -> None:
    target = _target(served, url)
    async with session.post(target.url, data=served.bodies[0], headers=target.headers) as answer:
        answer.raise_for_status()
        await answer.read()


def _mean_batch(before: RouterStats, after: RouterStats) -> float:
    """Items of the first stage's queue over its batches; all are over by now."""
    items = after.stages[0].waits - before.stages[0].waits
    batches = sum(after.stages[0].batch_sizes) - sum(before.stages[0].batch_sizes)
    return items / batches if batches else 0.0


def _idle_ratio(before: RouterStats, after: RouterStats) -> float:
    known = {replica.replica: replica for replica in before.replicas}
    first = [replica for replica in after.replicas if 0 in replica.stages and replica.replica in known]
    served_s = sum(replica.served_s - known[replica.replica].served_s for replica in first)
    idle_s = sum(replica.idle_s - known[replica.replica].idle_s for replica in first)
    return idle_s / served_s if served_s > 0 else 0.0


# ---------------------------------------------------------------- client process


def _send(served: Served, url: str, load: Load) -> tuple[list[float], dict[str, int], float]:
    return uvloop.run(_send_all(served, url, load))


async def _send_all(served: Served, url: str, load: Load) -> tuple[list[float], dict[str, int], float]:
    """Latencies of the answered, what became of the others, mean lag of sending."""
    times_s = synthetic(load.rate_rps, load.cv, load.seconds, load.seed).tolist()
    drawn = np.random.default_rng(load.seed).integers(len(served.bodies), size=len(times_s))
    bodies = [served.bodies[place] for place in drawn]
    raise_descriptors()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        headers={"X-Keystage-Deadline-S": f"{served.slo_s:.6g}"},
    ) as session:
        start_s = time.monotonic() + LEAD_S
        rows = await send_all(session, _target(served, url), times_s, bodies, start_s=start_s)
    counted = [row for row in rows if row.scheduled_s >= load.warm_s]
    missed: dict[str, int] = {}
    for row in counted:
        if not row.is_served:
            missed[row.error_class] = missed.get(row.error_class, 0) + 1
    latencies_s = [row.last_s - row.scheduled_s for row in counted if row.is_served]
    return latencies_s, missed, float(np.mean([row.sent_s - row.scheduled_s for row in rows]))

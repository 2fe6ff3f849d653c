"""The live side of `keystage bench overload`: one pipeline behind the gateway of a local world.

Before it: `overload` says what is served and how much comes. After it: what became of every request, and the
memory of router and gateway meanwhile. The open-loop client is a process of its own. It must not judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aiohttp
import numpy as np
import uvloop

from keystage.bench.whole_watch import ROLES, ProcessWatch
from keystage.bench.world_logs import telling_why
from keystage.bundle.api import Pipeline, emulated
from keystage.bundle.store import write
from keystage.loadgen.arrivals import synthetic
from keystage.loadgen.sender import KEEP_ALIVE_S, send_all
from keystage.loadgen.target import Target, TargetKind
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.wire.descriptors import raise_descriptors

READY_S = 120.0
LEAD_S = 1.0
ANSWER_S = 60.0
SAMPLE_S = 0.2
TOLD_RATIO = 0.95
"""Part of the SLO that requests tell as their deadline: the rest is for the way there and back."""
AT_ONCE_S = 0.5
"""A refusal that comes as fast came before the request waited."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A pipeline and what is asked of it.

    Attributes:
        name: in tables.
        words: what it is.
        pipeline: its description.
        devices: of each stage.
        env: of its functions.
        target: how it is asked.
        body: what is sent.
        slo_s: within which an answer is good.
        computed_rps: capacity computed of its devices.
    """

    name: str
    words: str
    pipeline: Pipeline
    devices: tuple[str, ...]
    env: Mapping[str, str]
    target: TargetKind
    body: bytes
    slo_s: float
    computed_rps: float


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one load gave; counts are of requests after the warm-up.

    Attributes:
        load: over the capacity, 0: the run that tells the capacity.
        offered_rps: requests a second.
        goodput_rps: answered within the SLO, by when they were answered.
        p50_s: latency of those answered.
        p99_s: the same.
        late: answered, but not within the SLO.
        refused: not answered.
        at_once: of those, refused before they waited.
        refusal_p99_s: until a refusal at once.
        codes: refusals by status or error.
        memory: bytes by role, the most of the run.
        lag_s: mean delay of sending: the client's own lateness.
    """

    load: float
    offered_rps: float
    goodput_rps: float
    p50_s: float
    p99_s: float
    late: int
    refused: int
    at_once: int
    refusal_p99_s: float
    codes: Mapping[str, int]
    memory: Mapping[str, float]
    lag_s: float


def looping(tokens: int = 24, slots: int = 16, wave_s: float = 0.012) -> Kind:
    """Two stages that sessions pass for every token."""
    device = f"emulated:alpha=0.0001,beta={wave_s}"
    pipeline = emulated("overloop", 2, execution="looping", activation_bytes=256)
    body = b'{"prompt":[1,2,3,4],"max_tokens":%d,"temperature":0}' % tokens
    # Two waves are under way, one at each stage; a session makes a token every two wave times.
    session_s = (tokens + 1) * 2 * (wave_s + 0.0001 * slots / 2)
    words = f"2 stages of {1e3 * wave_s:g} ms a wave, {slots} sessions at once, {tokens} tokens each"
    env = {"KEYSTAGE_SLOTS": str(slots)}
    return Kind(
        "looping", words, pipeline, (device,) * 2, env, "function", body, 4 * session_s, slots / session_s
    )


def single_pass(batch: int = 8, alpha_s: float = 0.02, beta_s: float = 0.1) -> Kind:
    """Two stages that batches pass once."""
    device = f"emulated:alpha={alpha_s},beta={beta_s}"
    pipeline = emulated("overpass", 2, execution="single-pass", activation_bytes=256)
    batch_s = alpha_s * batch + beta_s
    words = f"2 stages of {1e3 * alpha_s:g} ms an item and {1e3 * beta_s:g} ms a batch of at most {batch}"
    env = {"KEYSTAGE_MAX_BATCH": str(batch)}
    return Kind(
        "single-pass", words, pipeline, (device,) * 2, env, "raw", b"x" * 256, 10 * batch_s, batch / batch_s
    )


class OverloadWorld:
    """A pipeline that is up.

    Args:
        kind: what it is.
        url: of it at the gateway.
        world: where it runs.
        pool: the client's process.
    """

    def __init__(self, kind: Kind, url: str, world: LocalWorld, pool: ProcessPoolExecutor) -> None:
        self._kind = kind
        self._url = url
        self._world = world
        self._pool = pool

    async def run(self, rate_rps: float, seconds: float, *, seed: int, load: float) -> Run:
        """Sends one load, and looks at processes meanwhile."""
        loop = asyncio.get_running_loop()
        sent = loop.run_in_executor(self._pool, _send, self._kind, self._url, rate_rps, seconds, seed)
        pids = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        watch = ProcessWatch(self._world, pids, ANSWER_S + seconds, SAMPLE_S)
        begun_s = time.monotonic()
        while not sent.done() and time.monotonic() - begun_s < ANSWER_S + seconds:
            watch.sample(time.monotonic() - begun_s)
            await asyncio.sleep(SAMPLE_S)
        rows, lag_s = await sent
        samples = watch.samples
        memory = {
            role: float(np.max(samples[samples[:, 2] == ROLES.index(role)][:, 3], initial=0.0))
            for role in ("router", "gateway")
        }
        return _judged(self._kind, rows, lag_s, seconds, load, memory)


@contextlib.asynccontextmanager
async def opened(kind: Kind) -> AsyncIterator[OverloadWorld]:
    """Brings the pipeline up; it has answered when it is there."""
    with tempfile.TemporaryDirectory(prefix="keystage-overload-") as folder:
        home = Path(folder)
        with telling_why(home / "home"):
            async with LocalWorld(home / "home", controller=False) as world:
                bundle = home / kind.pipeline.name
                bundle.mkdir()
                write(bundle, kind.pipeline)
                name = kind.pipeline.name
                await world.deploy(
                    *deployments_for(bundle, kind.pipeline, device=kind.devices, env=dict(kind.env))
                )
                for stage in kind.pipeline.stages:
                    await world.wait_ready(f"{name}-stage-{stage.index}", 1, READY_S)
                await world.wait_ready(name, 1, READY_S)
                url = f"{world.gateway_url}/function/{name}"
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    made = OverloadWorld(kind, url, world, pool)
                    await made.run(0.5 * kind.computed_rps, 2.0, seed=1, load=0.0)
                    yield made


_Row = tuple[float, float, bool, str]
"""Scheduled second, latency in seconds, whether it was answered, else why not."""


def _judged(
    kind: Kind, rows: list[_Row], lag_s: float, seconds: float, load: float, memory: Mapping[str, float]
) -> Run:
    warm_s = seconds / 4
    counted = [row for row in rows if row[0] >= warm_s]
    latencies_s = [row[1] for row in counted if row[2]]
    refused = [row for row in counted if not row[2]]
    at_once_s = [row[1] for row in refused if row[1] < AT_ONCE_S]
    late = sum(latency_s > kind.slo_s for latency_s in latencies_s)
    good = sum(
        is_served and latency_s <= kind.slo_s and warm_s <= at_s + latency_s < seconds
        for at_s, latency_s, is_served, _ in rows
    )
    span_s = seconds - warm_s

    def percentile(values: list[float], q: float) -> float:
        return float(np.percentile(values, q)) if values else math.nan

    return Run(
        load,
        len(counted) / span_s,
        good / span_s,
        percentile(latencies_s, 50),
        percentile(latencies_s, 99),
        late,
        len(refused),
        len(at_once_s),
        percentile(at_once_s, 99) if at_once_s else 0.0,
        dict(Counter(row[3] for row in refused)),
        memory,
        lag_s,
    )


# ---------------------------------------------------------------- client process


def _send(kind: Kind, url: str, rate_rps: float, seconds: float, seed: int) -> tuple[list[_Row], float]:
    return uvloop.run(_send_all(kind, url, rate_rps, seconds, seed))


async def _send_all(
    kind: Kind, url: str, rate_rps: float, seconds: float, seed: int
) -> tuple[list[_Row], float]:
    times_s = synthetic(rate_rps, 1.0, seconds, seed).tolist()
    raise_descriptors()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        headers={"X-Keystage-Deadline-S": f"{TOLD_RATIO * kind.slo_s:.6g}"},
    ) as session:
        start_s = time.monotonic() + LEAD_S
        rows = await send_all(
            session, Target(kind.target, url), times_s, [kind.body] * len(times_s), start_s=start_s
        )
    found = [(row.scheduled_s, row.last_s - row.scheduled_s, row.is_served, row.error_class) for row in rows]
    return found, float(np.mean([row.sent_s - row.scheduled_s for row in rows]))

"""Serves a diffusion workload live in one of two ways: same router, workers, wire, devices and arrivals.

Brings a program up on the local platform, on `devices` workers that host every module but the first (which
needs no device), replays arrivals open loop, and counts answers within their objective. `bench.diffusion`
chooses what is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from keystage.bench.world_logs import telling_why
from keystage.bundle.program import bundle_program
from keystage.bundle.store import load
from keystage.local.api import Deployment
from keystage.local.world import LocalWorld
from keystage.router.face_http import DEADLINE_HEADER

HANDLER = Path(__file__).parent / "diffusion_handler"
READY_S = 240.0


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Attributes:
        name: for the table.
        path: import path of its program.
        options: of the program.
        batching: `KEYSTAGE_BATCHING`.
        late: `KEYSTAGE_LATE`.
    """

    name: str
    path: str
    options: Mapping[str, Any]
    batching: str
    late: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """An open-loop schedule.

    Attributes:
        times_s: when each request is sent, ascending.
        bodies: of each.
        objectives_s: of each.
    """

    times_s: Sequence[float]
    bodies: Sequence[bytes]
    objectives_s: Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave.

    Attributes:
        offered: requests.
        good: answered within their objective.
        late: answered or refused too late.
        refused: refused before that.
        failed: anything else.
        seconds: length of the schedule.
        batch: mean batch of the denoiser, or of whole requests.
        lag_s: 99th percentile of how late requests were sent.
    """

    offered: int
    good: int
    late: int
    refused: int
    failed: int
    seconds: float
    batch: float
    lag_s: float

    @property
    def goodput_rps(self) -> float:
        """Answers within their objective, a second."""
        return self.good / self.seconds


class Serving:
    """A program that is up.

    Args:
        url: of its router.
        session: HTTP client.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def ask(self, body: bytes, objective_s: float | None = None) -> tuple[int, float]:
        """Status and seconds of one request."""
        headers = {"content-type": "application/json"}
        if objective_s is not None:
            headers[DEADLINE_HEADER.decode()] = f"{objective_s:.4f}"
        sent_s = time.monotonic()
        async with self._session.post(self._url, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status, time.monotonic() - sent_s

    async def replay(self, arrivals: Arrivals) -> Outcome:
        """Sends a schedule and waits for every answer."""
        before = await self._batches()
        start_s = time.monotonic() + 0.1
        lags: list[float] = []

        async def one(at_s: float, body: bytes, objective_s: float) -> tuple[int, float]:
            await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
            lag_s = time.monotonic() - start_s - at_s
            lags.append(lag_s)
            status, seconds = await self.ask(body, objective_s)
            return status, seconds + lag_s

        done = await asyncio.gather(
            *(
                one(*each)
                for each in zip(arrivals.times_s, arrivals.bodies, arrivals.objectives_s, strict=True)
            )
        )
        outcomes = list(zip(done, arrivals.objectives_s, strict=True))
        good = sum(status == 200 and seconds <= bound_s for (status, seconds), bound_s in outcomes)
        refused = sum(status == 504 and seconds < 0.98 * bound_s for (status, seconds), bound_s in outcomes)
        failed = sum(status not in (200, 504) for (status, _), _ in outcomes)
        after = await self._batches()
        counts = {
            stage: (items - before[stage][0], n - before[stage][1]) for stage, (items, n) in after.items()
        }
        # The denoiser alone, where the program is in modules; the first module computes nothing.
        counted = [1] if len(counts) == 3 else [stage for stage in counts if stage]
        items = sum(counts[stage][0] for stage in counted)
        batches = sum(counts[stage][1] for stage in counted)
        return Outcome(
            offered=len(done),
            good=good,
            late=len(done) - good - refused - failed,
            refused=refused,
            failed=failed,
            seconds=float(arrivals.times_s[-1]),
            batch=items / batches if batches else 0.0,
            lag_s=float(np.percentile(lags, 99)),
        )

    async def _batches(self) -> dict[int, tuple[int, int]]:
        """Turns and batches of each module so far."""
        async with self._session.get(f"{self._url}/_/stats") as answer:
            stats = await answer.json()
        return {stage["stage"]: (stage["services"], sum(stage["batch_sizes"])) for stage in stats["stages"]}


@contextlib.asynccontextmanager
async def serving(
    system: System, home: Path, *, devices: int, device: str, most_batch: int
) -> AsyncIterator[Serving]:
    """Brings a system up on so many devices, one worker each.

    Args:
        system: which.
        home: folder for its bundle and state.
        devices: workers.
        device: `cpu` for modules that sleep, `cuda` for real ones.
        most_batch: largest batch of a worker.
    """
    bundle = bundle_program(system.path, home / "bundle", "bench", system.options, HANDLER)
    last = len(load(bundle).stages) - 1
    common = {
        "KEYSTAGE_PIPELINE": "bench", "KEYSTAGE_BUNDLE": bundle.absolute().as_uri(),
        "KEYSTAGE_HANDLER": str(HANDLER), "KEYSTAGE_BATCHING": system.batching, "KEYSTAGE_LATE": system.late,
        "KEYSTAGE_MAX_BATCH": str(most_batch), "KEYSTAGE_THREADS": "1", "KEYSTAGE_QUEUE_ITEMS": "4096",
    }  # fmt: skip

    def function(name: str, role: str, **variables: str) -> Deployment:
        labels = {"keystage.pipeline": "bench", "keystage.role": role}
        return Deployment(
            service=name, image=f"keystage/{role}", labels=labels,
            envVars={"KEYSTAGE_ROLE": role, **common, **variables},
        )  # fmt: skip

    front = function("front", "stage", KEYSTAGE_STAGES="0", KEYSTAGE_DEVICE=device)
    work = function("work", "stage", KEYSTAGE_STAGES=f"1-{last}", KEYSTAGE_DEVICE=device)
    with telling_why(home / "world"):
        async with LocalWorld(
            home / "world", gateway_port=None, controller=False, keysmanager=False
        ) as world:
            await world.deploy(function("bench", "router"), front, work)
            if devices > 1:
                await world.scale("work", devices)
            router = (await world.wait_ready("bench", 1, READY_S))[0]
            await world.wait_ready("front", 1, READY_S)
            await world.wait_ready("work", devices, READY_S)
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                yield Serving(f"http://{router.address}", session)

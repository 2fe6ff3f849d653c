"""Serves a diffusion workload live: one router, wire, set of devices and arrivals for all compared.

Brings a program up on the local platform, on `devices` workers that host every module but the first, replays
arrivals open loop, and counts answers within their objective. `bench.diffusion` chooses what is compared;
`bench.diffusion_whole` puts request-level batching in front of a `Serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
BEFORE_RATIO = 0.98
"""Of its objective: who is refused earlier was refused by a plan, later because time was up."""


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Attributes:
        name: for the table.
        path: import path of its program.
        options: of the program.
        batching: `KEYSTAGE_BATCHING`.
        late: `KEYSTAGE_LATE`.
        most_batch: largest batch that the router makes.
    """

    name: str
    path: str
    options: Mapping[str, Any]
    batching: str
    late: str
    most_batch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """An open-loop schedule.

    Attributes:
        times_s: when each request is sent, ascending.
        bodies: of each.
        objectives_s: of each.
        steps: of each.
    """

    times_s: Sequence[float]
    bodies: Sequence[bytes]
    objectives_s: Sequence[float]
    steps: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave.

    Attributes:
        offered: requests.
        good: answered within their objective.
        late: answered after it.
        refused: refused before it.
        expired: refused when it had come.
        failed: anything else.
        seconds: length of the schedule.
        batch: mean batch of the denoiser, or of whole requests; of requests that still lived at its end.
        lag_s: 99th percentile of how late requests were sent.
    """

    offered: int
    good: int
    late: int
    refused: int
    expired: int
    failed: int
    seconds: float
    batch: float
    lag_s: float

    @property
    def goodput_rps(self) -> float:
        """Answers within their objective, a second."""
        return self.good / self.seconds


class Asking(Protocol):
    """What a schedule is replayed against."""

    async def ask(self, body: bytes, objective_s: float | None = None) -> tuple[int, float]:
        """Status and seconds of one request."""
        ...

    async def batches(self) -> tuple[int, int]:
        """Requests in batches so far, each as often as it was in one, and batches."""
        ...


class Serving:
    """A program that is up; an `Asking` where the router batches.

    Args:
        url: of its router.
        session: HTTP client.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def ask(self, body: bytes, objective_s: float | None = None) -> tuple[int, float]:
        """See `Asking`."""
        headers = {"content-type": "application/json"}
        if objective_s is not None:
            headers[DEADLINE_HEADER.decode()] = f"{objective_s:.4f}"
        sent_s = time.monotonic()
        async with self._session.post(self._url, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status, time.monotonic() - sent_s

    async def batches(self) -> tuple[int, int]:
        """See `Asking`: of the module behind the first, the denoiser of a program in modules."""
        async with self._session.get(f"{self._url}/_/stats") as answer:
            stats = await answer.json()
        stage = stats["stages"][1]
        return stage["services"], sum(stage["batch_sizes"])


async def replay(up: Asking, arrivals: Arrivals) -> Outcome:
    """Sends a schedule and waits for every answer."""
    items, batches = await up.batches()
    start_s = time.monotonic() + 0.1
    lags: list[float] = []

    async def one(at_s: float, body: bytes, objective_s: float) -> tuple[int, float]:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        lag_s = time.monotonic() - start_s - at_s
        lags.append(lag_s)
        status, seconds = await up.ask(body, objective_s)
        return status, (seconds + lag_s) / objective_s

    done = await asyncio.gather(
        *(one(*each) for each in zip(arrivals.times_s, arrivals.bodies, arrivals.objectives_s, strict=True))
    )
    items_after, batches_after = await up.batches()
    answered = [ratio for status, ratio in done if status == 200]
    refused = [ratio for status, ratio in done if status == 504]
    good, before = sum(ratio <= 1 for ratio in answered), sum(ratio < BEFORE_RATIO for ratio in refused)
    return Outcome(
        offered=len(done),
        good=good,
        late=len(answered) - good,
        refused=before,
        expired=len(refused) - before,
        failed=len(done) - len(answered) - len(refused),
        seconds=float(arrivals.times_s[-1]),
        batch=(items_after - items) / max(1, batches_after - batches),
        lag_s=float(np.percentile(lags, 99)),
    )


def _bundle(system: System, home: Path) -> Path:
    home.mkdir()
    folder = home.parent / f"bundle-{system.name}"
    if not folder.exists():
        bundle_program(system.path, folder, "bench", system.options, HANDLER)
    return folder


@contextlib.asynccontextmanager
async def serving(system: System, home: Path, *, devices: int, device: str) -> AsyncIterator[Serving]:
    """Brings a system up on so many devices, one worker each.

    Args:
        system: which.
        home: folder for its state, made here; its bundle is made beside, once for all systems of its name.
        devices: workers.
        device: `cpu` for modules that sleep, `cuda` for real ones.
    """
    bundle = _bundle(system, home)
    last = len(load(bundle).stages) - 1
    common = {
        "KEYSTAGE_PIPELINE": "bench", "KEYSTAGE_BUNDLE": bundle.absolute().as_uri(),
        "KEYSTAGE_HANDLER": str(HANDLER), "KEYSTAGE_BATCHING": system.batching, "KEYSTAGE_LATE": system.late,
        "KEYSTAGE_MAX_BATCH": str(system.most_batch), "KEYSTAGE_THREADS": "1", "KEYSTAGE_QUEUE_ITEMS": "4096",
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

"""Our own engine as `keystage bench engine` measures it on GPUs: HTTP, router, workers, client.

Brings a pipeline up on some devices, and says with its workers' own words why where that fails. What is
measured when, and beside what, is in `engine_gpu_parts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from keystage.bench.frame import BenchError
from keystage.bench.world_logs import log_ends
from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.loadgen.lengths import Length
from keystage.loadgen.target import Target
from keystage.local.api import Deployment
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

READY_S = 200.0
WARM_PROMPT, WARM_TOKENS = 16, 8
_HAND_OFF = re.compile(r"keystage\.worker\.(?:device|cuda)_lane: (.*)")
_ADDRESS = re.compile(r"ipc://\S+/")


@dataclass(frozen=True, slots=True)
class Setup:
    """How one of our ways runs.

    Attributes:
        bundle: the split model.
        devices: of each worker, in the order of the stages; each hosts an equal share of them.
        kv_bytes: of all workers.
        slots: sessions of a worker.
        replicas: how often the whole pipeline is there, on the devices in turn.
        env: more variables.
    """

    bundle: Path
    devices: Sequence[str]
    kv_bytes: int
    slots: int
    replicas: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Up:
    """A pipeline that is up.

    Attributes:
        url: of its router.
        session: for requests.
        pipeline: what is served.
        home: state folder.
    """

    url: str
    session: aiohttp.ClientSession
    pipeline: Pipeline
    home: Path

    def waves_s(self) -> dict[int, float]:
        """Median seconds that waves of single tokens spent in a worker, summed over the path, by rows."""
        spent: dict[tuple[str, int], list[float]] = defaultdict(list)
        for path in sorted((self.home / "events").glob("*")):
            for line in path.read_bytes().splitlines():
                event = msgspec.json.decode(line)
                if event.get("event") == "wave" and not event["prefill_rows"]:
                    spent[path.name, event["rows"]].append(event["compute_s"])
        by_rows: dict[int, float] = defaultdict(float)
        for (_, rows), seconds in spent.items():
            by_rows[rows] += float(np.median(seconds))
        return dict(by_rows)

    def idle_parts(self, begin_s: float, end_s: float) -> list[float]:
        """Part of a time in which each worker computed nothing (bubbles), in the order of the stages.

        Args:
            begin_s: beginning of the time, Unix seconds.
            end_s: its end.
        """
        found: dict[tuple[int, str], float] = {}
        for path in sorted((self.home / "events").glob("*")):
            waves = [
                e for e in map(msgspec.json.decode, path.read_bytes().splitlines()) if e["event"] == "wave"
            ]
            if not waves:
                continue
            # An event is written at the end of its wave; one that began before counts by its part.
            ends = (
                (e["t"], min(e["compute_s"], e["t"] - begin_s)) for e in waves if begin_s < e["t"] <= end_s
            )
            found[waves[0]["stages"][0], path.name] = sum(seconds for _, seconds in ends)
        return [max(0.0, 1 - busy_s / (end_s - begin_s)) for _, busy_s in sorted(found.items())]

    def hand_offs(self) -> list[str]:
        """What the workers have said of the ways that their tensors take."""
        found: dict[str, None] = {}
        for path in sorted((self.home / "logs").glob("*.log")):
            said = _HAND_OFF.findall(path.read_text(errors="replace"))
            found |= dict.fromkeys(_ADDRESS.sub("", text) for text in said)
        return list(found)


def deployments(setup: Setup, pipeline: Pipeline, events: Path) -> list[Deployment]:
    """The router, and one function per worker that hosts its share of the stages."""
    stages, workers = len(pipeline.stages), len(setup.devices)
    bounds = [i * stages // workers for i in range(workers + 1)]
    env = {
        "KEYSTAGE_EVENTS": str(events),
        "KEYSTAGE_KV_BYTES": str(setup.kv_bytes // workers),
        **setup.env,
    }
    router, *functions = deployments_for(
        setup.bundle, pipeline, device=setup.devices[0], slots=setup.slots, env=env
    )
    made = [router]
    for index, device in enumerate(setup.devices):
        first, last = bounds[index], bounds[index + 1] - 1
        variables = {
            **functions[first].envVars,
            "KEYSTAGE_STAGES": f"{first}-{last}" if last > first else str(first),
            "KEYSTAGE_DEVICE": device,
        }
        made.append(msgspec.structs.replace(functions[first], envVars=variables))
    return made


@contextlib.asynccontextmanager
async def serving(setup: Setup, tell: Callable[[str], None]) -> AsyncIterator[Up]:
    """Brings the pipeline up, and down again.

    Args:
        setup: which, and where.
        tell: is told the last lines of every log where something went wrong.
    """
    pipeline = store.load(setup.bundle)
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder:
        home = Path(folder)
        made = deployments(setup, pipeline, home / "events")
        try:
            async with LocalWorld(home, gateway_port=None, controller=False, keysmanager=False) as world:
                await world.deploy(*made)
                await _replicate(world, setup, made)
                url = f"http://{(await world.wait_ready(made[0].service, 1, READY_S))[0].address}"
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                    yield Up(url, session, pipeline, home)
        except BaseException:
            tell(log_ends(home))
            raise


async def _replicate(world: LocalWorld, setup: Setup, made: list[Deployment]) -> None:
    """Waits for the workers; the replicas beyond the first are functions of their own, on the next GPU."""
    if setup.replicas > 1:
        more = []
        for number in range(1, setup.replicas):
            for function in made[1:]:
                variables = {**function.envVars, "KEYSTAGE_DEVICE": f"cuda:{number}"}
                if not function.envVars["KEYSTAGE_DEVICE"].startswith("cuda"):
                    variables = dict(function.envVars)
                name = f"{function.service}-r{number}"
                more.append(msgspec.structs.replace(function, service=name, envVars=variables))
        await world.deploy(*more)
        made = made + more
    for function in made[1:]:
        await world.wait_ready(function.service, 1, READY_S)


def prompts_of(pipeline: Pipeline, count: int, length: int) -> list[list[int]]:
    """Prompts, the same each time."""
    draws = np.random.default_rng(count * 65_537 + length)
    return [draws.integers(0, pipeline.vocab_size, length).tolist() for _ in range(count)]


async def items_per_s(up: Up, target: Target, at_once: int, seconds: float) -> float:
    """Items that are answered a second while so many are asked for at once.

    Raises:
        BenchError: an answer is none.
    """
    done, until_s, begin_s = 0, [0.0], [0.0]

    async def ask(index: int) -> None:
        nonlocal done
        while True:
            body = target.body(Length(prompt_tokens=128, output_tokens=64), 1, index)
            async with up.session.post(target.url, data=body, headers=target.headers) as response:
                if response.status != 200:
                    raise BenchError(f"{target.url}: {response.status}: {(await response.text())[:300]}")
                await response.read()
            now_s = time.monotonic()
            if now_s > until_s[0]:
                return
            done += now_s > begin_s[0]
            index += at_once

    begin_s[0] = time.monotonic() + 0.3 * seconds  # the first ones are uneven
    until_s[0] = begin_s[0] + seconds
    await asyncio.gather(*(ask(index) for index in range(at_once)))
    return done / seconds

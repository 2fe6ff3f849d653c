"""The part `burst` of `keystage bench engine`: a key stage doubled from a standby while the pipeline serves.

Real supervisor, KeysManager, router and workers, a GPU for each replica where there are several. The stage
is named a key stage, as the controller would; once its standby waits, requests stream, the number is raised,
and what the clients see before, meanwhile and after is told with the start's own times.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from keystage.bench.engine_client import Answer, complete
from keystage.bench.engine_gpu_world import READY_S, WARM_PROMPT, WARM_TOKENS, prompts_of
from keystage.bench.frame import BenchError
from keystage.bundle import store
from keystage.bundle.api import Pipeline
from keystage.local.api import KeyStageList
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

POLL_S = 0.02
FIRST_WORK_S = 60.0
PAUSE_S = 0.1
COUNTERS = ("keystage_session_moves_total", "keystage_late_copies_total", "keystage_replayed_tokens_total")


@dataclass(frozen=True, slots=True)
class Burst:
    """What came of it.

    Attributes:
        stage: the key stage.
        via: how its second replica was started.
        source: where its parameters came from.
        ready_s: from the decision to ready.
        work_s: from the decision to its first computed work.
        before_s: median seconds between two tokens of a request in the seconds before.
        before_gap_s: longest wait of a request for its next token in these seconds.
        after_s: median seconds between two tokens in the seconds after its first work.
        gap_s: longest wait of a request for its next token between the decision and a second after that work.
        gap_at_s: when that wait began, from the decision on.
        paused: waits of over a tenth of a second (`PAUSE_S`) in that time, of all requests.
        moves: sessions that went to the second replica.
        late_copies: moves that waited for a copy of KV state in vain.
        replayed_tokens: tokens computed again for the others.
        preemptions: sessions that had to give their KV blocks to others, all in all: then waits say nothing.
    """

    stage: int
    via: str
    source: str
    ready_s: float
    work_s: float
    before_s: float
    before_gap_s: float
    after_s: float
    gap_s: float
    gap_at_s: float
    paused: int
    moves: int
    late_copies: int
    replayed_tokens: int
    preemptions: int


async def doubled(
    bundle: Path,
    device: str,
    stage: int,
    *,
    at_once: int,
    prompt: int,
    tokens: int,
    beside_s: float,
    kv_bytes: int,
) -> Burst:
    """Doubles a stage under load.

    Args:
        bundle: the split model.
        device: `cuda`, `cpu`.
        stage: which.
        at_once: requests at a time.
        prompt: tokens of each.
        tokens: new tokens of each.
        beside_s: seconds measured before and after.
        kv_bytes: of each worker.

    Raises:
        BenchError: no standby, or no work, within its bound; a request failed.
    """
    pipeline = store.load(bundle)
    env = {"KEYSTAGE_KV_BYTES": str(kv_bytes)}
    made = deployments_for(bundle, pipeline, device=device, slots=at_once, env=env)
    with tempfile.TemporaryDirectory(prefix="keystage-bench-") as folder:
        async with LocalWorld(Path(folder), gateway_port=None, controller=False, keysmanager=True) as world:
            await world.deploy(*made)
            workers = [(await world.wait_ready(f.service, 1, READY_S))[0].address for f in made[1:]]
            url = f"http://{(await world.wait_ready(made[0].service, 1, READY_S))[0].address}"
            world.supervisor.set_key_stages(KeyStageList(pipeline.name, (stage,)))
            await _prepared(world, is_gpu=device.startswith("cuda"))
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                warm = prompts_of(pipeline, at_once, WARM_PROMPT)
                await complete(session, url, warm, WARM_TOKENS)
                load = _Load(session, url, pipeline, at_once, prompt, tokens)
                load.owner = f"http://{workers[0]}"
                return await _under_load(world, load, made[1 + stage].service, stage, beside_s)


class _Load:
    """Requests one after another, several at a time, until told to stop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        pipeline: Pipeline,
        at_once: int,
        prompt: int,
        tokens: int,
    ) -> None:
        self._session, self._url, self._tokens = session, url, tokens
        self._prompts = prompts_of(pipeline, at_once, prompt)
        self._stopping = False
        self.answers: list[Answer] = []
        self.owner = ""
        """Address of the worker that preempts: that of the first stage."""

    async def run(self) -> None:
        """Asks until `stop`."""
        await asyncio.gather(*map(self._client, self._prompts))

    def stop(self) -> None:
        """No new request."""
        self._stopping = True

    async def counters(self) -> list[int]:
        """The router's `COUNTERS`, and preemptions."""
        counts = [await self._count(self._url, name) for name in COUNTERS]
        return [*counts, await self._count(self.owner, "keystage_preemptions_total")]

    async def _count(self, url: str, name: str) -> int:
        async with self._session.get(f"{url}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        return int(sum(one.value for family in families for one in family.samples if one.name == name))

    async def _client(self, prompt: Sequence[int]) -> None:
        while not self._stopping:
            self.answers += (await complete(self._session, self._url, [prompt], self._tokens)).answers


async def _under_load(world: LocalWorld, load: _Load, function: str, stage: int, beside_s: float) -> Burst:
    running = asyncio.create_task(load.run())
    offset_s = time.time() - time.perf_counter()
    try:
        counted = await load.counters()
        await asyncio.sleep(2 * beside_s)  # the first half is not looked at
        decided_s = world.supervisor.now()
        await world.scale(function, 2)
        until_s = time.monotonic() + FIRST_WORK_S
        while not (start := world.starts(function)[-1]).first_item_at_s or start.wanted_at_s < decided_s:
            if time.monotonic() > until_s or running.done():
                raise BenchError(
                    f"the second replica of {function} got no work in {FIRST_WORK_S:.0f} s: {start}"
                )
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(1.0 + beside_s)
        counts = [now - then for now, then in zip(await load.counters(), counted, strict=True)]
        load.stop()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    work_s = start.first_item_at_s
    times = [[at_s + offset_s for at_s, _ in answer.times_s] for answer in load.answers]
    pairs = [pair for one in times for pair in itertools.pairwise(one)]
    settled_s = work_s + 1.0
    meanwhile = _waits(pairs, decided_s, settled_s)
    gap_s, gap_from_s = max(meanwhile)
    before_gap_s, _ = max(_waits(pairs, decided_s - beside_s, decided_s))
    return Burst(
        stage, start.via, start.source, start.ready_at_s - decided_s, work_s - decided_s,
        _middle(pairs, decided_s - beside_s, decided_s), before_gap_s,
        _middle(pairs, settled_s, settled_s + beside_s), gap_s, gap_from_s - decided_s,
        sum(wait_s > PAUSE_S for wait_s, _ in meanwhile), *counts,
    )  # fmt: skip


def _waits(pairs: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Waits for a token of which some part was between two times, with when they began."""
    return [(later - sooner, sooner) for sooner, later in pairs if later > begin_s and sooner < end_s]


def _middle(pairs: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    found = [later - sooner for sooner, later in pairs if begin_s <= sooner and later <= end_s]
    if not found:
        raise BenchError(f"no two tokens of a request came within {end_s - begin_s:.1f} s")
    return float(np.median(found))


async def _prepared(world: LocalWorld, *, is_gpu: bool) -> None:
    """Waits until the key stage's parameters are held, and on a GPU until its standby waits."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        statuses = [node.status for node in world.supervisor.nodes() if node.status is not None]
        held = [holder for status in statuses for holder in status.holders if holder.state == "ready"]
        idle = [standby for status in statuses for standby in status.standbys if standby.state == "idle"]
        if held and (idle or not is_gpu):
            return
        await asyncio.sleep(0.1)
    raise BenchError(f"no standby of the key stage within {READY_S:.0f} s; logs in {world.home.logs}")

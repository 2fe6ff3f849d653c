"""The local world with real KeysManagers: replicas forked from holders, and what outlives what."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from support.keysmanager_forks import random_bundle
from support.shared_memory import shared_names

from keystage.bundle.store import load
from keystage.controller.domain.decision import KeyStage, PublishKeyStages, SetReplicas, Site
from keystage.controller.platforms.local import LocalPlatform
from keystage.controller.platforms.unix_http import UnixConnection, exchange
from keystage.local.adopted import END_WAIT_S, children
from keystage.local.api import ReplicaRecord
from keystage.local.config import LocalSettings
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld

WAIT_S = 60.0
ENDS_S = LocalSettings.model_fields["shutdown_s"].default + END_WAIT_S
"""After a world has ended: what its processes together get, and then what is left of daemons."""
UP = """
import sys
from pathlib import Path
from keystage.bundle.store import load
from keystage.local.pipeline import deployments_for
from keystage.local.up import UpOptions, run
home, bundle = Path(sys.argv[1]), Path(sys.argv[2])
functions = tuple(deployments_for(bundle, load(bundle)))
sys.exit(run(UpOptions(home=home, gateway_port=0, controller=False, nodes=2, deployments=functions)))
"""


def bounded(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 150.0))


async def until(condition: Any, what: str, within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)


async def deploy(world: LocalWorld, bundle: Path) -> list[ReplicaRecord]:
    """Deploys a bundle; its first replicas, the router first."""
    functions = deployments_for(bundle, load(bundle))
    await world.deploy(*functions)
    return [(await world.wait_ready(f.service, 1, WAIT_S))[0] for f in functions]


async def complete(router: ReplicaRecord, model: str, tokens: int = 4) -> None:
    body = {"model": model, "prompt": [3, 4, 5], "max_tokens": tokens, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"http://{router.address}/v1/completions", json=body) as answer,
    ):
        told = await answer.json()
        assert answer.status == 200, told
        assert told["usage"]["completion_tokens"] == tokens


def dead_children() -> list[int]:
    found = []
    for pid in children():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        found += [pid] if state == "Z" else []
    return found


def is_dead(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_replicas_are_forked_from_holders_and_outlive_the_daemon(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path / "tiny", stages=2)
    name = load(bundle).name
    stage = f"{name}-stage-1"
    before = psutil.Process().children(recursive=True)
    dead_before = set(dead_children())

    async def run() -> None:
        async with LocalWorld(
            tmp_path / "home", gateway_port=None, controller=False, keysmanager=True
        ) as world:
            (node,) = world.keysmanagers
            router, *stages = await deploy(world, bundle)
            assert [(r.via, r.note, r.node) for r in stages] == [("holder", "", node)] * 2
            assert (router.via, router.note) == ("fork-server", "")
            await complete(router, name)
            await until(lambda: world.starts(stage)[0].first_item_at_s, "the first item is known")
            (start,) = world.starts(stage)
            assert start.wanted_at_s <= start.forked_at_s <= start.mapped_at_s <= start.forward_at_s
            assert start.forward_at_s <= start.ready_at_s <= start.first_item_at_s

            platform = LocalPlatform(world.home.control, world.home.path, timeout_s=5.0)
            await asyncio.to_thread(
                platform.apply, [PublishKeyStages(name, (KeyStage(1, 2.0), KeyStage(0, 1.0)))]
            )
            assert (await asyncio.to_thread(platform.observe)).nodes == ()

            def ranks() -> dict[int, int | None]:
                status = world.supervisor.nodes()[0].status
                return {h.stage: h.rank for h in status.holders} if status else {}

            await until(lambda: ranks() == {1: 0, 0: 1}, "the daemon has the list")

            daemon = world.keysmanagers[node]
            assert daemon.process is not None
            family = psutil.Process(daemon.process.pid).children(recursive=True)
            assert len(family) >= 3  # fork server, two holders
            os.kill(daemon.process.pid, signal.SIGKILL)
            await until(lambda: daemon.restarts == 1, "the daemon is started anew")
            await until(lambda: all(map(is_dead, family)), "fork server and holders end")
            await complete(router, name)
            await asyncio.to_thread(platform.apply, [SetReplicas(stage, 2)])
            both = await world.wait_ready(stage, 2, WAIT_S)
            assert both[0] == stages[1]  # the same process, never disturbed
            assert (both[1].via, both[1].note) == ("holder", "")
            await until(lambda: ranks() == {1: 0, 0: 1}, "the new daemon has the list too")
            platform.close()

            os.kill(both[1].pid, signal.SIGKILL)
            await until(lambda: world.replicas(stage)[-1].restarts == 1, "its end is seen")
            await world.wait_ready(stage, 2, WAIT_S)
            await world.scale(stage, 1)
            await until(lambda: len(world.replicas(stage)) == 1, "one is drained")
            await complete(router, name)
            await until(lambda: set(dead_children()) <= dead_before, "nothing dead is left unreaped")
            living = [p for p in psutil.Process().children(recursive=True) if p not in before]
        await until(lambda: all(map(is_dead, living)), "all processes of the world end", ENDS_S)
        assert not set(children()) & {p.pid for p in living}

    bounded(run())


def replicas_of(control: Path) -> list[ReplicaRecord]:
    status, body = exchange(UnixConnection(str(control), WAIT_S), "GET", "/replicas")
    assert status == 200
    return msgspec.json.decode(body, type=list[ReplicaRecord])


async def scaled(control: Path, function: str, count: int) -> list[ReplicaRecord]:
    """Waits for so many ready replicas of a function, and no others."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        mine = [r for r in await asyncio.to_thread(replicas_of, control) if r.function == function]
        if [r.state for r in mine] == ["ready"] * count:
            return mine
        assert time.monotonic() < deadline_s, mine
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_two_nodes_serve_one_pipeline_and_nothing_survives_their_killed_supervisor(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path / "tiny", stages=2)
    name = load(bundle).name
    stage = f"{name}-stage-0"
    shared = shared_names()
    up = subprocess.Popen(
        [sys.executable, "-c", UP, str(tmp_path / "home"), str(bundle)],
        env=os.environ | {"KEYSTAGE_KEYSMANAGER_OFF": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    family: list[psutil.Process] = []

    async def run(control: Path) -> None:
        (router,) = await scaled(control, name, 1)
        (first,) = await scaled(control, stage, 1)
        (second,) = await scaled(control, f"{name}-stage-1", 1)
        assert router.node == "node-0"
        assert {first.node, second.node} == {"node-0", "node-1"}
        assert [r.via for r in (router, first, second)] == ["fork-server", "holder", "holder"]
        await complete(router, name, 8)  # its steps cross from one node to the other and back
        platform = LocalPlatform(control, tmp_path / "home", timeout_s=5.0)
        snapshot = await asyncio.to_thread(platform.observe)
        assert [n.node for n in snapshot.nodes] == ["node-0", "node-1"]
        (place,) = snapshot.pipelines[0].stages[0].scale.placed
        assert (place.replica, place.node, place.is_ready) == (first.replica, first.node, True)
        same = SetReplicas(stage, 3, (Site(first.node), Site(first.node)))
        await asyncio.to_thread(platform.apply, [same])
        three = await scaled(control, stage, 3)
        assert {r.node for r in three} == {first.node}
        victims = (three[0].replica, three[2].replica)
        await asyncio.to_thread(platform.apply, [SetReplicas(stage, 1, (), victims)])
        assert await scaled(control, stage, 1) == [three[1]]
        await complete(router, name, 8)
        platform.close()

    try:
        assert up.stderr is not None
        assert any(f"{name}-stage-1 is ready" in line for line in up.stderr)
        run_folder = Path((tmp_path / "home" / "run").read_text().strip())
        bounded(run(run_folder / "up.sock"))
        family = psutil.Process(up.pid).children(recursive=True)
        # Gateway, sweeper, router, two stages, two daemons; below these two fork servers and two holders.
        assert len([p for p in family if p.ppid() == up.pid]) == 7
        assert len(family) == 11
    finally:
        up.kill()
        up.wait()
        up.stderr.close()
    deadline_s = time.monotonic() + 10.0
    while not all(map(is_dead, family)) or run_folder.exists():
        assert time.monotonic() < deadline_s, [p for p in family if not is_dead(p)]
        time.sleep(0.01)
    assert shared_names() == shared

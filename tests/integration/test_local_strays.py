"""A pipeline that was split anew into fewer stages: functions of the stages that are gone go as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.local.api import Deployment
from keystage.local.errors import BadDeployment
from keystage.local.events import Deployed
from keystage.local.pipeline import deployments_for
from keystage.local.strays import strays
from keystage.local.world import LocalWorld

WAIT_S = 60.0
DEVICE = "emulated:alpha=0,beta=0"


def deployments(folder: Path, stages: int, name: str = "demo") -> list[Deployment]:
    """Writes a bundle of so many stages into the folder, and describes its functions."""
    folder.mkdir(exist_ok=True)
    pipeline = emulated(name, stages, execution="single-pass")
    write(folder, pipeline)
    return deployments_for(folder, pipeline, device=DEVICE)


def world(tmp_path: Path) -> LocalWorld:
    return LocalWorld(tmp_path / "home", gateway_port=None, controller=False)


def bounded(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * WAIT_S))


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.02)


def names(w: LocalWorld) -> list[str]:
    return sorted(f.deployment.service for f in w.supervisor.view().functions)


@pytest.mark.slow
def test_stages_that_are_gone_are_removed_with_their_replicas(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(*deployments(tmp_path / "bundle", 3))
            await w.wait_ready("demo-stage-2", 1, WAIT_S)
            await w.deploy(*deployments(tmp_path / "bundle", 2))
            assert names(w) == ["demo", "demo-stage-0", "demo-stage-1"]
            await until(lambda: not w.replicas("demo-stage-2"), "the replica of stage 2 ends")

    bounded(run())


def test_a_new_start_does_not_bring_them_back(tmp_path: Path) -> None:
    """The model was split anew while nothing ran."""

    async def run() -> None:
        async with world(tmp_path) as w:
            await w.deploy(*deployments(tmp_path / "bundle", 3))
        deployments(tmp_path / "bundle", 2)
        async with world(tmp_path) as w:
            assert names(w) == ["demo", "demo-stage-0", "demo-stage-1"]
            await w.wait_ready("demo-stage-1", 1, WAIT_S)

    bounded(run())


def test_a_stage_that_its_bundle_does_not_have_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as w:
            stages = deployments(tmp_path / "bundle", 3)
            await w.deploy(*deployments(tmp_path / "bundle", 2))
            with pytest.raises(BadDeployment, match=r"no stage 2 of pipeline demo: .* has 2 stages, 0 to 1"):
                w.supervisor.handle(Deployed(stages[3]))
            assert names(w) == ["demo", "demo-stage-0", "demo-stage-1"]

    bounded(run())


def test_what_is_not_known_is_left_alone(tmp_path: Path) -> None:
    """Other pipelines, bundles elsewhere or unreadable, more stages than before in whatever order."""
    router, *stages = deployments(tmp_path / "bundle", 2)
    other = deployments(tmp_path / "other", 4, "other")

    def moved(deployment: Deployment, bundle: str) -> Deployment:
        env = {**deployment.envVars, "KEYSTAGE_BUNDLE": bundle, "KEYSTAGE_STAGES": "7"}
        return msgspec.structs.replace(deployment, envVars=env)

    elsewhere = moved(other[1], "http://bundles.example/other")
    away = moved(other[1], (tmp_path / "nowhere").as_uri())
    assert strays([router, *stages, *other[1:]]) == {}
    assert strays([elsewhere, away]) == {}
    assert list(strays([router, *stages, *other, elsewhere])) == [elsewhere.service]

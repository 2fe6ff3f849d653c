"""`SetCpu` over every world that has CPU stages: stated twice, seen, and nothing for what is gone."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.platform_worlds import ScriptedWorld, SupervisedWorld

from keystage.bundle.api import CpuProfile, CpuRow, emulated
from keystage.controller.domain.decision import SetCpu
from keystage.controller.domain.platform import Platform
from keystage.controller.domain.snapshot import CpuView
from keystage.local.api import Deployment
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec
from keystage.simulator.api import World as SimulatedWorldSpec
from keystage.simulator.platform import SimulatedPlatform

FUNCTION = "p-stage-0"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ksp-", dir="/tmp"))  # a UNIX socket's path holds 107 bytes
    yield path
    shutil.rmtree(path)


def stage(folder: Path) -> Deployment:
    """A CPU stage with a bundle description beside it."""
    (folder / "b").mkdir(exist_ok=True)
    (folder / "b" / "pipeline.json").write_bytes(
        msgspec.json.encode(emulated("p", 1, execution="single-pass"))
    )
    return Deployment(
        service=FUNCTION,
        envVars={
            "KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_STAGES": "0",
            "KEYSTAGE_DEVICE": "cpu", "KEYSTAGE_BUNDLE": f"file://{folder}/b",
        },
        labels={"com.openfaas.scale.min": "0"},
    )  # fmt: skip


def simulated() -> SimulatedPlatform:
    spec = StageSpec(alpha_s=0.01, cpu_core_s=0.02, cores=1.0, most_cores=2.0)
    pipeline = PipelineSpec(name="p", stages=(spec,), arrivals=ArrivalSpec(rate_rps=1.0, count=5))
    return SimulatedPlatform(SimulatedWorldSpec(pipelines=(pipeline,)), 1, epoch_s=time.time())


@pytest.fixture(params=["scripted", "supervised", "simulated"])
def platform(request: pytest.FixtureRequest, folder: Path) -> Iterator[Platform]:
    if request.param == "simulated":
        world = simulated()
        yield world
        world.close()
        return
    made = ScriptedWorld(folder) if request.param == "scripted" else SupervisedWorld(folder)
    made.deploy(stage(folder))
    yield made.platform
    made.end()
    made.platform.close()


def cpu(platform: Platform) -> CpuView:
    (pipeline,) = platform.observe().pipelines
    view = pipeline.stages[0].cpu
    assert view is not None
    return view


def test_cores_may_be_set_twice_and_are_seen(platform: Platform) -> None:
    assert cpu(platform).cores == 1.0
    for _ in range(2):
        platform.apply([SetCpu(FUNCTION, 2.0)])
        assert cpu(platform).cores == 2.0
    assert cpu(platform).most >= 2.0


def test_cores_of_a_function_that_is_gone_do_nothing(platform: Platform) -> None:
    platform.apply([SetCpu("gone", 2.0)])
    assert cpu(platform).cores == 1.0


def test_what_cores_are_worth_comes_from_the_bundles_profile(folder: Path) -> None:
    world = ScriptedWorld(folder)
    try:
        world.deploy(stage(folder))
        assert cpu(world.platform).per_core_s is None  # without a profile the policy leaves cores alone
        rows = [
            CpuRow(latency_s=0.001 * b + 0.02 / c + n * 1e-5, cores=c, batch=b)
            for c in (1, 2, 4)
            for b in (1, 2)
            for n in (-1, 1)
        ]
        path = folder / "b" / "cpu-profile.json"
        path.write_bytes(msgspec.json.encode(CpuProfile(1, [rows])))
        seen = cpu(world.platform)
        assert seen.per_core_s == pytest.approx(0.02, rel=1e-3)
        assert seen.low_s is not None
        assert seen.low_s > 0
        path.write_bytes(b"{")
        assert cpu(world.platform).per_core_s is None
    finally:
        world.end()
        world.platform.close()


def test_emulated_devices_have_no_cores_to_give(folder: Path) -> None:
    world = ScriptedWorld(folder)
    try:
        deployed = stage(folder)
        world.deploy(
            msgspec.structs.replace(deployed, envVars={**deployed.envVars, "KEYSTAGE_DEVICE": "emulated"})
        )
        assert world.platform.observe().pipelines[0].stages[0].cpu is None
    finally:
        world.end()
        world.platform.close()

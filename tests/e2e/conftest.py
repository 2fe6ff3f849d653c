"""One release for all tests of a run: installed by the first, removed by the last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.e2e_world import FUNCTION_NAMESPACE, NAMESPACE, RELEASE, Settings, World, figure, wait_for
from support.helm import run_helm

from keystage.bundle.split import bundle_emulated

MODEL, EMULATED = "smollm2", "em"


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings.read()


@pytest.fixture(scope="session")
def bundles(settings: Settings) -> Path:
    """Both bundles, made where they are missing."""
    if not (settings.bundles / MODEL / "pipeline.json").exists():
        from keystage.bundle.split import split

        split(MODEL, 4, "uniform", settings.bundles / MODEL, MODEL, "fp32")
    if not (settings.bundles / EMULATED / "pipeline.json").exists():
        bundle_emulated(
            EMULATED,
            3,
            "single-pass",
            activation_bytes=512,
            context_length=0,
            out=settings.bundles / EMULATED,
        )
    return settings.bundles


@pytest.fixture(scope="session")
def world(settings: Settings, bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The release, Ready."""
    world = World(settings, tmp_path_factory.mktemp("e2e"))
    status = run_helm("status", RELEASE, "--namespace", NAMESPACE)
    if status.code == 0 and os.environ.get("KEYSTAGE_E2E_KEEP") == "1":
        world.login()
    else:
        assert status.code != 0, f"release {RELEASE} is in {NAMESPACE} already: helm uninstall it first"
        figure("seconds from helm install to all Ready", f"{world.install():.1f}")
    yield world
    if os.environ.get("KEYSTAGE_E2E_KEEP") == "1":
        return
    if run_helm("status", RELEASE, "--namespace", NAMESPACE).code == 0:
        world.helm("uninstall", RELEASE, "--wait", "--timeout", "3m")
    world.kubectl("delete", "namespace", NAMESPACE, FUNCTION_NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def emulated(world: World) -> str:
    """Name of an emulated pipeline of three stages that is deployed; its middle stage is the slow one."""
    stack = world.stack(
        EMULATED,
        env={
            "*": {"KEYSTAGE_MAX_BATCH": "1"},
            "em-stage-0": {"KEYSTAGE_DEVICE": "emulated:beta=0.002"},
            "em-stage-1": {"KEYSTAGE_DEVICE": "emulated:beta=0.1"},
            "em-stage-2": {"KEYSTAGE_DEVICE": "emulated:beta=0.002"},
        },
        labels={"em-stage-1": {"com.openfaas.scale.max": "8"}},
    )
    figure("seconds from faas-cli deploy to all stages Ready (emulated)", f"{world.deploy(stack):.1f}")
    assert world.call(EMULATED, b"abc") == b"abc"
    wait_for(lambda: len(world.parked()) >= 2, "two parked pods are prepared")
    return EMULATED

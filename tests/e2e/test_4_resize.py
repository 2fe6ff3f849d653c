"""CPU of a running stage changes in place; where it may not, a replica more does it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.e2e_load import Load, summary
from support.e2e_world import FUNCTION_NAMESPACE, World, figure, wait_for

from keystage.bundle.api import CPU_PROFILE, CpuProfile, CpuRow
from keystage.bundle.split import bundle_emulated
from keystage.kubernetes.client import FUNCTIONS, Kind, Object

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NAME = "cores"
STAGE = f"{NAME}-stage-1"
SERVICE_S = 0.04
RATE_RPS = 15.0
LIMIT_RANGES = Kind("v1", "limitranges")
QUOTA = """
import glob
for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
    for found in glob.glob(path):
        print(open(found).read().split()[0])
        raise SystemExit
"""


@pytest.fixture(scope="module")
def bundle(world: World) -> str:
    """An emulated pipeline whose profile says that cores help its middle stage, and only that."""
    folder = world.settings.bundles / NAME
    if not (folder / "pipeline.json").exists():
        bundle_emulated(NAME, 3, "single-pass", activation_bytes=512, context_length=0, out=folder)
    rows = [
        CpuRow(
            latency_s=0.01 + 0.03 / cores + 1e-5 * repeat, cores=cores, batch=batch, activation_bytes=512.0
        )
        for cores in (0.5, 1.0, 1.5, 2.0)
        for batch in (1.0, 2.0)
        for repeat in range(3)
    ]
    profile = CpuProfile(1, [[], rows, []])
    (folder / CPU_PROFILE).write_bytes(msgspec.json.encode(profile))
    return NAME


def _stack(world: World, bundle: str, most: int) -> Any:
    """A deadline that one replica of half a core does not meet."""
    resources = {"requests": {"cpu": "100m", "memory": "192Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
    return world.stack(
        bundle,
        env={
            "*": {"KEYSTAGE_MAX_BATCH": "1"},
            bundle: {"KEYSTAGE_SLO": '{"deadline_s": 0.06}'},
            f"{bundle}-stage-0": {"KEYSTAGE_DEVICE": "emulated:beta=0.001"},
            STAGE: {"KEYSTAGE_DEVICE": f"emulated:beta={SERVICE_S}"},
            f"{bundle}-stage-2": {"KEYSTAGE_DEVICE": "emulated:beta=0.001"},
        },
        labels={STAGE: {"com.openfaas.scale.max": str(most)}},
        resources={STAGE: resources},
    )


@pytest.fixture
def limited(world: World) -> Iterator[None]:
    """No container of the namespace may have more than 0.6 cores: the API server refuses larger ones."""
    limits: Object = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "e2e"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "600m"}}]},
    }
    world.functions.create(LIMIT_RANGES, limits, manager="e2e")
    yield
    world.functions.delete(LIMIT_RANGES, "e2e")


def test_cores_are_raised_in_place(world: World, bundle: str) -> None:
    stack = _stack(world, bundle, 1)
    world.deploy(stack)
    (pod,) = world.ready_pods(STAGE)
    name = pod["metadata"]["name"]
    before = int(world.python(name, QUOTA))
    with Load(f"{world.url}/function/{bundle}", RATE_RPS) as load:
        begun_s = time.time()
        wait_for(lambda: (world.status(STAGE).get("cores") or 0.5) > 0.5, "the policy gives cores", 120)
        decided_s = time.time()
        wait_for(lambda: int(world.python(name, QUOTA)) > before, "the cgroup's quota is larger", 60)
        applied_s = time.time()
        load.wait(30)
        load.stop()
    (after,) = world.ready_pods(STAGE)
    (container,) = after["status"]["containerStatuses"]
    figure("seconds of load until the policy gave cores", f"{decided_s - begun_s:.1f}")
    figure("seconds from cores in the status to the new quota in the cgroup", f"{applied_s - decided_s:.1f}")
    figure(
        "cores, CPU quota before and after (us)",
        f"{world.status(STAGE)['cores']}, {before}, {world.python(name, QUOTA)}",
    )
    figure("requests during the resize", summary(load))
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert container["restartCount"] == 0
    assert after["status"]["qosClass"] == pod["status"]["qosClass"]
    assert not load.failed
    world.remove(stack)


@pytest.mark.usefixtures("limited")
def test_a_resize_that_is_refused_ends_in_a_replica_more(world: World, bundle: str) -> None:
    """While a person wants one replica the policy can only ask for cores; free again, it takes a replica."""
    stack = _stack(world, bundle, 2)
    world.deploy(stack)
    world.scale(STAGE, 1)
    (pod,) = world.ready_pods(STAGE)
    name = pod["metadata"]["name"]
    before = world.python(name, QUOTA)
    with Load(f"{world.url}/function/{bundle}", RATE_RPS) as load:

        def refused() -> list[str]:
            logs = [
                world.system.logs(p["metadata"]["name"], "controller", since_s=time.time() - 120).decode()
                for p in world.release_pods("controller")
            ]
            return [line for text in logs for line in text.splitlines() if f"{STAGE} keeps" in line]

        lines = wait_for(refused, "the refused resize is told", 120, 0.5)
        figure("what the controller says of the refused resize", lines[0])
        wait_for(lambda: (world.status(STAGE).get("cores") or 0.5) <= 0.5, "the cores are withdrawn", 30)
        assert world.python(name, QUOTA) == before
        assert len(world.ready_pods(STAGE)) == 1
        freed_s = time.time()
        world.functions.patch(FUNCTIONS, STAGE, {"spec": {"replicas": None}}, manager="e2e")
        wait_for(lambda: len(world.ready_pods(STAGE)) == 2, "a replica more", 120, 0.05)
        figure("seconds until a second replica does what cores may not", f"{time.time() - freed_s:.1f}")
        load.wait(30)
        load.stop()
    figure("requests meanwhile", summary(load))
    assert not load.failed
    assert name in {p["metadata"]["name"] for p in world.ready_pods(STAGE)}, (
        f"{FUNCTION_NAMESPACE}/{name} was replaced"
    )
    world.remove(stack)

"""Cores of running pods over a fake cluster: within the class, with threads, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kube_platform import Answering, KubeWorld

from keystage.kubernetes.client import FUNCTIONS, Object
from keystage.kubernetes.cores import asked_of, cpu_of, given_to
from keystage.local.api import Deployment

EQUAL = {"cpu": "1", "memory": "1Gi"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    made = KubeWorld(tmp_path)
    made.kube.nodes.add("node1", cpu="4")
    yield made
    made.close()
    made.platform.close()


def stage(world: KubeWorld, requests: dict[str, str], limits: dict[str, str]) -> None:
    env = {"KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_STAGES": "0"}
    world.deploy(Deployment(service="s", envVars=env, requests=requests, limits=limits))


def worker(world: KubeWorld, name: str, requests: dict[str, str], limits: dict[str, str]) -> Answering:
    labels = {"keystage.dev/function": "s", "keystage.dev/role": "stage"}
    made = world.pod(name, labels=labels, node="node1", resources={"requests": requests, "limits": limits})
    server = world.serve(made["status"]["podIP"], {"PUT /_/threads": lambda _: (204, b"")})
    world.until(lambda: pod(world, name).get("status", {}).get("containerStatuses"))
    world.until(
        lambda: any(
            c["type"] == "Ready" and c["status"] == "True" for c in pod(world, name)["status"]["conditions"]
        )
    )
    return server


def pod(world: KubeWorld, name: str) -> Object:
    return world.world.pods().get(name, {})


def decide(world: KubeWorld, cores: float) -> None:
    """As the reconciler writes it."""
    body = {"status": {"cores": cores}}
    world._client.patch(FUNCTIONS, "s", body, manager="keystage-controller", subresource="status")
    world.until(lambda: world.world.functions()["s"].get("status", {}).get("cores") == cores)


def asks(world: KubeWorld, name: str) -> tuple[float, float]:
    return cpu_of(asked_of(world.kube.get("pods", name)))


def threads(server: Answering) -> list[int]:
    return [json.loads(body)["threads"] for body in server.bodies("PUT /_/threads")]


def turn(world: KubeWorld, *names: str) -> None:
    """One round, with what the API server shows seen."""
    world.resizer.round()
    for name in names:
        version = world.kube.get("pods", name)["metadata"]["resourceVersion"]
        world.until(lambda n=name, v=version: pod(world, n)["metadata"]["resourceVersion"] == v)


def kubelet(world: KubeWorld, name: str, outcome: str, message: str = "") -> None:
    made = world.kube.kubelet.resize(name, outcome, message)  # type: ignore[arg-type]
    version = made["metadata"]["resourceVersion"]
    world.until(lambda: pod(world, name)["metadata"]["resourceVersion"] == version)


def test_more_cores_then_threads_and_fewer_threads_then_cores(world: KubeWorld) -> None:
    stage(world, EQUAL, EQUAL)
    server = worker(world, "a", EQUAL, EQUAL)
    decide(world, 3.0)
    turn(world, "a")
    assert asks(world, "a") == (3.0, 3.0)
    assert threads(server) == [1]  # it does not have them yet
    kubelet(world, "a", "in-progress")
    turn(world, "a")
    assert threads(server) == [1]
    kubelet(world, "a", "done")
    turn(world, "a")
    assert threads(server) == [1, 3]
    assert pod(world, "a")["metadata"]["annotations"]["keystage.dev/cores"] == "3"
    assert cpu_of(given_to(pod(world, "a"))) == (3.0, 3.0)
    decide(world, 2.0)
    turn(world, "a")
    assert threads(server) == [1, 3, 2]
    assert asks(world, "a") == (2.0, 2.0)
    assert world.kube.get("pods", "a")["status"]["qosClass"] == "Guaranteed"
    assert world.resizer.capped() == {}


def test_burstable_keeps_its_class(world: KubeWorld) -> None:
    requests, limits = {"cpu": "500m", "memory": "1Gi"}, EQUAL
    stage(world, requests, limits)
    worker(world, "a", requests, limits)
    decide(world, 2.0)
    turn(world, "a")
    assert asks(world, "a") == (1.0, 2.0)
    assert world.kube.get("pods", "a")["status"]["qosClass"] == "Burstable"


def test_without_cpu_resources_only_threads_are_told(world: KubeWorld) -> None:
    memory = {"memory": "1Gi"}
    stage(world, memory, {})
    server = worker(world, "a", memory, {})
    decide(world, 2.5)
    before = pod(world, "a")["metadata"]["resourceVersion"]
    turn(world, "a")
    assert threads(server) == [3]
    assert world.kube.get("pods", "a")["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize("how", ["condition", "server"])
def test_an_infeasible_resize_caps_the_function_and_is_taken_back(world: KubeWorld, how: str) -> None:
    stage(world, EQUAL, EQUAL)
    worker(world, "a", EQUAL, EQUAL)
    worker(world, "b", EQUAL, EQUAL)
    decide(world, 3.0)
    if how == "server":  # as v1.36 answers what a node cannot ever hold
        world.kube.faults.fail(1, code=403, verb="patch", resource="pods/resize")
        turn(world, "a", "b")
    else:
        turn(world, "a", "b")
        kubelet(world, "a", "done")
        kubelet(world, "b", "infeasible", "Node didn't have enough capacity")
        turn(world, "a", "b")
    capped = world.resizer.capped()["s"]
    assert capped.cores == 1.0
    assert "enough capacity" in capped.reason or "403" in capped.reason
    assert world.wishes.read().functions["s"].cores == 1.0
    assert world.said == [f"s keeps 1 cores a replica, 3 cannot be had: {capped.reason}"]
    turn(world, "a", "b")  # before the status says so
    assert [asks(world, name) for name in ("a", "b")] == [(1.0, 1.0)] * 2
    seen = world.platform.observe().pipelines[0].stages[0].cpu
    assert seen is not None
    assert seen.most == seen.cores


def test_a_deferred_resize_is_waited_for(world: KubeWorld) -> None:
    stage(world, EQUAL, EQUAL)
    server = worker(world, "a", EQUAL, EQUAL)
    decide(world, 3.0)
    turn(world, "a")
    kubelet(world, "a", "deferred", "others have them")
    turn(world, "a")
    assert world.resizer.capped() == {}
    assert threads(server) == [1]
    kubelet(world, "a", "done")
    turn(world, "a")
    assert threads(server) == [1, 3]


def test_a_worker_that_does_not_answer_is_told_again_and_one_that_refuses_is_not(world: KubeWorld) -> None:
    stage(world, EQUAL, EQUAL)
    server = worker(world, "a", EQUAL, EQUAL)
    server.answers["PUT /_/threads"] = lambda _: (503, b"")
    decide(world, 1.0)
    turn(world, "a")
    turn(world, "a")
    assert threads(server) == [1]  # not at once again
    server.answers["PUT /_/threads"] = lambda _: (400, b"no threads here")
    world.until(lambda: (turn(world, "a"), len(threads(server)) == 2)[1])
    turn(world, "a")
    assert threads(server) == [1, 1]


def test_it_works_by_itself(world: KubeWorld) -> None:
    stage(world, EQUAL, EQUAL)
    server = worker(world, "a", EQUAL, EQUAL)
    world.resizer.start()
    decide(world, 2.0)
    world.until(lambda: asks(world, "a") == (2.0, 2.0))
    world.kube.kubelet.resize("a", "done")
    world.until(lambda: threads(server)[-1:] == [2])
    world.resizer.stop()

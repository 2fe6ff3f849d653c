"""Nodes, the API server, a decision's target fail: the cluster becomes as wished all the same."""

from __future__ import annotations

import dataclasses
import time

import pytest
from support.kube.cluster import Kube
from support.kube.fixtures import kube  # noqa: F401  (a fixture)
from support.reconciler_world import (
    SETTINGS,
    ReconcilerWorld,
    router,
    stage,
    world_fixture,  # noqa: F401  (a fixture)
)

from keystage.controller.domain.decision import Site
from keystage.kubernetes.view import is_leaving
from keystage.local.api import Deployment

STAGE = "llm-stage-0"


def node_of(pod: dict[str, object]) -> str:
    return pod["spec"]["nodeName"]  # type: ignore[index, no-any-return]


def test_pods_of_a_lost_node_are_replaced_and_deleted_for_good_when_it_is_gone(
    world: ReconcilerWorld,
) -> None:
    world.deploy(stage())
    world.start()
    world.wishes.set_replicas(STAGE, 2, [Site("node2"), Site("node2")], (), time.time())
    pods = world.until_ready(STAGE, 2)
    lost = [p["metadata"]["name"] for p in pods if node_of(p) == "node2"]
    assert lost
    world.kube.nodes.lose("node2")
    world.kube.until(
        lambda: len(world.ready(STAGE)) == 2 and {node_of(p) for p in world.ready(STAGE)} == {"node1"}
    )
    assert all(is_leaving(world.kube.get("pods", name)) for name in lost)
    world.kube.until(lambda: any(line.startswith("ReplicaLost") for line in world.events(STAGE)))


def test_an_evicted_pod_is_replaced_before_it_is_gone(world: ReconcilerWorld) -> None:
    world.kube.players.stop_s = 30.0
    world.deploy(stage())
    world.start()
    (pod,) = world.until_ready(STAGE, 1)
    world.kube.delete("pods", pod["metadata"]["name"])
    (successor,) = world.until_ready(STAGE, 1)
    assert successor["metadata"]["name"] != pod["metadata"]["name"]
    assert world.kube.get("pods", pod["metadata"]["name"])["metadata"]["deletionTimestamp"]


@pytest.mark.slow
def test_a_full_site_is_left_for_another_node(kube: Kube) -> None:  # noqa: F811
    kube.nodes.add("node1", cpu="8")
    kube.nodes.add("node2", cpu="1")
    settings = dataclasses.replace(SETTINGS, requests=(("cpu", "800m"), ("memory", "64Mi")))
    world = ReconcilerWorld(kube, settings)
    kube.play(start_s=0.02, ready_s=0.02, stop_s=0.02)
    try:
        world.deploy(stage())
        world.start()
        world.until_ready(STAGE, 1)
        world.wishes.set_replicas(STAGE, 3, [Site("node2"), Site("node2")], (), time.time())
        pods = world.until_ready(STAGE, 3)
        assert sorted(node_of(p) for p in pods) == ["node1", "node1", "node2"]
        kube.until(lambda: any(line.startswith("PlacementFailed") for line in world.events(STAGE)))
    finally:
        world.stop()


def test_a_pod_without_any_place_is_told_of_and_goes_first(kube: Kube) -> None:  # noqa: F811
    kube.nodes.add("node1", cpu="1")
    settings = dataclasses.replace(SETTINGS, requests=(("cpu", "800m"), ("memory", "64Mi")))
    world = ReconcilerWorld(kube, settings)
    kube.play(start_s=0.02, ready_s=0.02, stop_s=0.02)
    try:
        world.deploy(stage())
        world.start()
        (serving,) = world.until_ready(STAGE, 1)
        world.wishes.set_replicas(STAGE, 2, (), (), time.time())
        kube.until(lambda: any("Unschedulable" in line for line in world.status(STAGE).get("trouble", ())))
        assert world.status(STAGE)["replicas"] == 2
        world.wishes.set_replicas(STAGE, 1, (), [serving["metadata"]["name"]], time.time())
        kube.until(lambda: all(p["spec"].get("nodeName") for p in world.pods(STAGE)))
        assert [p["metadata"]["name"] for p in world.ready(STAGE)] == [serving["metadata"]["name"]]
        kube.until(lambda: not world.status(STAGE).get("trouble"))
    finally:
        world.stop()


def test_an_outage_of_the_api_server_is_waited_for(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    world.until_ready(STAGE, 1)
    with world.kube.outage():
        world.wishes.set_replicas(STAGE, 3, (), (), time.time())
        world.kube.until(lambda: world.reconciler.turned_at_s > time.monotonic() - 1.0)
    world.until_ready(STAGE, 3)


@pytest.mark.slow
def test_calls_that_fail_or_hang_are_made_again_and_hold_up_no_other_function(world: ReconcilerWorld) -> None:
    world.deploy(stage(0), stage(1))
    world.start()
    world.until_ready(STAGE, 1)
    world.until_ready("llm-stage-1", 1)
    for name in (STAGE, "llm-stage-1"):
        world.kube.until(lambda name=name: world.status(name).get("ready") == 1)  # type: ignore[misc]
    hang_s = 8.0
    world.kube.faults.delay(hang_s, 1, verb="patch", resource="functions/status")
    world.wishes.set_replicas(STAGE, 2, (), (), time.time())
    world.kube.until(lambda: not any(rule.left for rule in world.kube.faults._rules), what="it hangs")
    began_s = time.monotonic()
    world.wishes.set_replicas("llm-stage-1", 3, (), (), time.time())
    world.until_ready("llm-stage-1", 3)
    assert len(world.pods(STAGE)) == 1  # its decision does not stand in its status yet
    assert time.monotonic() - began_s < hang_s
    world.kube.faults.fail(3, verb="create", resource="pods")
    world.until_ready(STAGE, 2)


def test_a_new_leader_changes_nothing_that_is_as_decided(world: ReconcilerWorld) -> None:
    world.deploy(router(), stage())
    world.start()
    world.wishes.set_replicas(STAGE, 3, (), (), time.time())
    before = {p["metadata"]["uid"] for p in world.until_ready(STAGE, 3)}
    world.kube.until(lambda: world.status(STAGE).get("ready") == 3)
    world.replace_leader()
    turned_s = world.reconciler.turned_at_s
    world.kube.until(lambda: world.reconciler.turned_at_s > turned_s)
    world.wishes.set_replicas(STAGE, 4, (), (), time.time())
    assert before < {p["metadata"]["uid"] for p in world.until_ready(STAGE, 4)}


def test_what_the_api_server_refuses_is_told_with_its_words(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.kube.patch("functions", STAGE, {"spec": {"labels": {"team": "no label!"}}})
    world.start()
    world.kube.until(lambda: any("no label!" in line for line in world.status(STAGE).get("trouble", ())))
    world.kube.patch("functions", STAGE, {"spec": {"labels": {"team": None}}})
    world.until_ready(STAGE, 1)
    world.kube.until(lambda: not world.status(STAGE).get("trouble"))


def test_several_replicas_have_a_disruption_budget_and_one_has_none(world: ReconcilerWorld) -> None:
    world.deploy(stage())
    world.start()
    world.until_ready(STAGE, 1)
    world.wishes.set_replicas(STAGE, 3, (), (), time.time())
    fake = world.kube
    fake.until(lambda: fake.get("poddisruptionbudgets", STAGE)["spec"]["minAvailable"] == 2)
    world.wishes.set_replicas(STAGE, 1, (), (), time.time())
    fake.until(lambda: not fake.list("poddisruptionbudgets"))


def test_a_plain_function_is_a_deployment_of_as_many_as_decided(world: ReconcilerWorld) -> None:
    world.deploy(Deployment(service="echo", image="echo:1", envProcess="cat"))
    world.start()
    world.until_ready("echo", 1)
    world.wishes.set_replicas("echo", 3, (), (), time.time())
    world.until_ready("echo", 3)
    world.kube.until(lambda: world.status("echo").get("ready") == 3)
    world.wishes.set_replicas("echo", 0, (), (), time.time())
    world.kube.until(lambda: not world.pods("echo"))
    world.kube.delete("functions", "echo")
    world.kube.until(lambda: not world.kube.list("deployments") and not world.kube.list("services"))

"""The link to the nodes' KeysManagers: statuses by node, key stages and grants told once, again when due."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kube_platform import TOKEN, Answering, KubeWorld

from keystage.keysmanager.api import Memory, NodeStatus
from keystage.keysmanager.pod_api import Grant
from keystage.kubernetes.client import PODS
from keystage.kubernetes.keysmanagers import KeysManagers, grants_of
from keystage.local.api import Deployment

STATUS = "GET /v1/status"
KEY_STAGES = "PUT /v1/key-stages"
GRANTS = "PUT /v1/grants"
PORT = 7810


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    made = KubeWorld(tmp_path)
    made.kube.nodes.add("node1")
    made.kube.nodes.add("node2")
    yield made
    made.close()
    made.platform.close()


def status(node: str, started_at_s: float = 1.0) -> NodeStatus:
    memory = Memory(limit_bytes=100, used_bytes=0, budget_bytes=85, segment_bytes=0, origin="cgroup2")
    return NodeStatus(
        node=node,
        protocol=1,
        started_at_s=started_at_s,
        holders=(),
        standbys=(),
        memory=memory,
        gpus=(),
        history=(),
    )


def daemon(world: KubeWorld, node: str) -> Answering:
    labels = {"app.kubernetes.io/component": "keysmanager"}
    made = world.pod(f"km-{node}", namespace="keystage", node=node, labels=labels)
    answers = {
        STATUS: lambda _: (200, msgspec.json.encode(status(node))),
        KEY_STAGES: lambda _: (204, b""),
        GRANTS: lambda _: (204, b""),
    }
    server = world.serve(made["status"]["podIP"], answers, PORT)
    world.until(lambda: world.world.keysmanagers().get(f"km-{node}", {}).get("status", {}).get("podIP"))
    return server


def pipeline(world: KubeWorld) -> None:
    for k in range(2):
        env = {
            "KEYSTAGE_ROLE": "stage", "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_STAGES": str(k),
            "KEYSTAGE_BUNDLE": "file:///bundles/p",
        }  # fmt: skip
        world.deploy(Deployment(service=f"p-stage-{k}", envVars=env))


def link(world: KubeWorld) -> KeysManagers:
    return KeysManagers(world.world, world.asking, lambda: world.wishes.read().key_stages)


def rounds(made: KeysManagers, count: int = 1) -> None:
    for _ in range(count):
        made._polled.round()


def grants(server: Answering) -> list[Any]:
    return [json.loads(body) for body in server.bodies(GRANTS)]


def test_statuses_by_node(world: KubeWorld) -> None:
    daemon(world, "node1")
    silent = daemon(world, "node2")
    silent.answers[STATUS] = lambda _: (500, b"")
    made = link(world)
    rounds(made)
    assert made.statuses() == {"node1": status("node1")}
    assert {token for server in world.servers for _, _, token in server.asked} == {f"Bearer {TOKEN}"}
    made.stop()


def test_key_stages_are_told_once_and_again_after_a_restart(world: KubeWorld) -> None:
    pipeline(world)
    server = daemon(world, "node1")
    made = link(world)
    rounds(made, 2)
    assert server.bodies(KEY_STAGES) == []  # nothing was ranked yet: what it keeps is left alone
    world.wishes.key_stages("p", [1, 0, 7])
    rounds(made, 2)
    told = [{"bundle": "file:///bundles/p", "stage": 1}, {"bundle": "file:///bundles/p", "stage": 0}]
    assert [json.loads(body) for body in server.bodies(KEY_STAGES)] == [told]
    server.answers[STATUS] = lambda _: (200, msgspec.json.encode(status("node1", 2.0)))
    rounds(made, 2)
    assert len(server.bodies(KEY_STAGES)) == 2
    world.wishes.key_stages("p", [0])
    server.answers[KEY_STAGES] = lambda _: (503, b"")
    rounds(made)
    server.answers[KEY_STAGES] = lambda _: (204, b"")
    rounds(made, 2)
    assert len(server.bodies(KEY_STAGES)) == 4
    made.stop()


def test_pods_of_a_node_are_granted_their_stages(world: KubeWorld) -> None:
    pipeline(world)
    first, second = daemon(world, "node1"), daemon(world, "node2")
    labels = {"keystage.dev/function": "p-stage-1", "keystage.dev/role": "stage"}
    made_pod = world.pod("a", node="node1", labels=labels)
    world.pod("parked", node="node1", labels={"keystage.dev/role": "stage", "keystage.dev/pool": "x"})
    world.until(lambda: len(world.world.pods()) == 2)
    made = link(world)
    rounds(made, 2)
    uid = made_pod["metadata"]["uid"]
    granted = {"pod_uid": uid, "bundle": "file:///bundles/p", "stages": [1]}
    assert grants(first) == [[granted]]
    assert grants(second) == [[]]
    early = Grant(pod_uid="parked-uid", bundle="file:///bundles/p", stages=(0,))
    assert made.grant("node1", early) == ""
    assert {g["pod_uid"] for g in grants(first)[-1]} == {uid, "parked-uid"}
    rounds(made)
    assert len(grants(first)) == 2
    other = Grant(pod_uid="other-uid", bundle="file:///bundles/p", stages=(0,))
    assert made.grant("node3", other) == "node node3 has no KeysManager"
    world._client.delete(PODS, "a", grace_s=0)
    world.until(lambda: "a" not in world.world.pods())
    rounds(made)
    assert [g["pod_uid"] for g in grants(first)[-1]] == ["parked-uid"]
    first.answers[GRANTS] = lambda _: (500, b"no")
    assert "500" in made.grant("node1", Grant(pod_uid="z", bundle="b", stages=(0,)))
    made.stop()


def test_grants_follow_what_a_pod_itself_says_first() -> None:
    deployment = Deployment(service="f", envVars={"KEYSTAGE_STAGES": "0", "KEYSTAGE_BUNDLE": "new"})

    def pod(uid: str, env: dict[str, str], **fields: Any) -> dict[str, Any]:
        labels = {"keystage.dev/function": "f", "keystage.dev/role": "stage"}
        pairs = [{"name": key, "value": value} for key, value in env.items()]
        return {
            "metadata": {"uid": uid, "labels": labels},
            "spec": {"nodeName": "n", "containers": [{"name": "function", "env": pairs}]},
            "status": fields,
        }

    old = pod("old", {"KEYSTAGE_STAGES": "2-3", "KEYSTAGE_BUNDLE": "was"})
    activated = pod("activated", {"KEYSTAGE_BUNDLE": "was"})
    ended = pod("ended", {}, phase="Failed")
    assert grants_of("n", [old, activated, ended], [deployment]) == [
        Grant(pod_uid="activated", bundle="was", stages=(0,)),
        Grant(pod_uid="old", bundle="was", stages=(2, 3)),
    ]
    assert grants_of("m", [old], [deployment]) == []

"""The controller over roles as the chart renders them: all it does is allowed, and nothing else is.

The gateway's part is in `test_gateway_kubernetes_rights`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from support.helm import Object, of_kind, render
from support.kube.access import Grant
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube
from support.kube.fixtures import kube as kube
from support.reconciler_world import SETTINGS, ReconcilerWorld, router, stage

from keystage.controller.clustered import LEASE
from keystage.controller.domain.decision import Site
from keystage.kubernetes.api import POOL_LABEL
from keystage.kubernetes.leader import Leader
from keystage.kubernetes.resize import Resizer
from keystage.kubernetes.view import annotations_of, is_leaving, labels_of
from keystage.kubernetes.world import World
from keystage.local.api import Deployment

ACCOUNT = "keystage-controller"
RBAC = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
STAGE = "llm-stage-0"
WAKE, UNTIL = "keystage.dev/wake", "keystage.dev/override-until"


@pytest.fixture
def objects() -> list[Object]:
    """What the chart renders to."""
    return render()


@pytest.fixture
def world(kube: Kube, objects: list[Object]) -> Iterator[ReconcilerWorld]:
    """A reconciler with the rights that the chart gives it, and nodes that play."""
    kube.load(*of_kind(objects, *RBAC, "Lease"))
    for name in ("node1", "node2"):
        kube.nodes.add(name, cpu="8")
    settings = dataclasses.replace(SETTINGS, parked_per_pipeline=1)
    made = ReconcilerWorld(kube, settings, service_account=ACCOUNT)
    made.cluster = kube.cluster()  # people and gateways write with rights of their own
    kube.play()
    try:
        yield made
    finally:
        made.stop()


def lead(world: ReconcilerWorld) -> None:
    """Takes, keeps and gives back the lease that the chart made."""
    cluster = world.kube.cluster(SYSTEM_NAMESPACE, ACCOUNT)
    leader = Leader(cluster, LEASE, "one", lease_s=3, renew_s=2, retry_s=0.1)
    led = threading.Event()
    thread = threading.Thread(target=leader.run, args=(led.set,))
    thread.start()
    assert led.wait(10)
    leader.release()
    thread.join(10)
    assert not world.kube.get("leases", LEASE, SYSTEM_NAMESPACE)["spec"].get("holderIdentity")


def scale(world: ReconcilerWorld) -> None:
    """Up beyond the parked pod, and down by a victim's name."""
    world.until_ready(STAGE, 1)
    world.until_parked(1)
    world.wishes.set_replicas(STAGE, 3, [Site("node1")], (), time.time())
    pods = world.until_ready(STAGE, 3)
    assert any(POOL_LABEL in labels_of(pod) for pod in pods)
    victim = pods[0]["metadata"]["name"]
    world.wishes.set_replicas(STAGE, 2, (), [victim], time.time())
    world.kube.until(lambda: victim not in {p["metadata"]["name"] for p in world.kube.list("pods")})
    world.kube.until(lambda: world.kube.list("poddisruptionbudgets"), what="a budget of two replicas")
    world.wishes.set_replicas(STAGE, 1, (), (), time.time())
    world.kube.until(lambda: not world.kube.list("poddisruptionbudgets"), what="no budget of one replica")
    world.until_ready(STAGE, 1)


def give_cores(world: ReconcilerWorld) -> None:
    """More cores in place, as a compensator decides."""
    refusals: list[str] = []
    resizer = Resizer(
        world.world,
        world.asking,
        world.wishes.set_cores,
        lambda _, text: refusals.append(text),
        default_requests={"cpu": "100m"},
    )
    world.wishes.set_cores(STAGE, 2.0)
    world.kube.until(lambda: world.status(STAGE).get("cores") == 2.0)

    def is_asked() -> bool:
        resizer.round()
        pods = world.pods(STAGE)
        return bool(pods) and all("keystage.dev/cores" in annotations_of(pod) for pod in pods)

    world.kube.until(is_asked, what="every pod is asked to have two cores")
    assert not refusals


def intend(world: ReconcilerWorld) -> None:
    """A person's wish and a waiting request, which the controller dates and takes back."""
    kube = world.kube
    kube.patch("functions", STAGE, {"spec": {"replicas": 2}, "metadata": {"annotations": {WAKE: "1"}}})
    kube.until(lambda: UNTIL in annotations_of(kube.get("functions", STAGE)))
    world.wishes.lift_override(STAGE)
    world.wishes.clear_wake(STAGE)
    kube.until(lambda: not {WAKE, UNTIL} & annotations_of(kube.get("functions", STAGE)).keys())


def change_role(world: ReconcilerWorld) -> None:
    """A plain function becomes a stage: its Deployment and Service go."""
    plain = Deployment(service="other", image="i:1", requests={"cpu": "100m"})
    world.deploy(plain)
    world.kube.until(lambda: world.kube.get("deployments", "other"))
    world.kube.until(lambda: world.kube.get("services", "other"))
    world.deploy(msgspec.structs.replace(stage(5), service="other"))
    world.kube.until(lambda: "other" not in names(world, "deployments") | names(world, "services"))


def names(world: ReconcilerWorld, plural: str) -> set[str]:
    return {item["metadata"]["name"] for item in world.kube.list(plural)}


def test_every_right_of_the_controller_is_there_and_needed(world: ReconcilerWorld) -> None:
    kube = world.kube
    lead(world)
    requests = {"cpu": "500m"}
    world.deploy(router(), msgspec.structs.replace(stage(), requests=requests))
    world.start()
    scale(world)
    give_cores(world)
    intend(world)
    change_role(world)
    kube.until(lambda: world.events(STAGE), what="an event tells what was done")
    assert kube.access.denied() == []
    assert kube.access.granted(ACCOUNT, SYSTEM_NAMESPACE)
    assert kube.access.unused(ACCOUNT, SYSTEM_NAMESPACE) == set()
    assert not any(is_leaving(pod) for pod in world.ready(STAGE))


def test_without_the_right_to_all_pods_the_controller_asks_for_none(kube: Kube) -> None:
    kube.load(*of_kind(render(sets=["controller.seesAllPods=false"]), *RBAC))
    kube.nodes.add("node1")
    clusters = (kube.cluster(namespace, ACCOUNT) for namespace in (FUNCTION_NAMESPACE, SYSTEM_NAMESPACE))
    world = World(*clusters, sees_all_pods=False)
    world.start()
    try:
        assert world.wait_synced(10.0)
        assert set(world.nodes()) == {"node1"}
    finally:
        world.stop()
    assert kube.access.denied() == []
    assert not [
        g
        for g in kube.access.granted(ACCOUNT, SYSTEM_NAMESPACE)
        if namespace_of(g) == "" and g.resource == "pods"
    ]


def test_nobody_may_everything_nor_what_would_give_more_rights(kube: Kube, objects: list[Object]) -> None:
    kube.load(*of_kind(objects, *RBAC))
    accounts = [one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")]
    assert {ACCOUNT, "keystage-gateway", "keystage-keysmanager"} <= set(accounts)
    for account in accounts:
        grants = kube.access.granted(account, SYSTEM_NAMESPACE)
        assert all("*" not in (grant.group, grant.resource, grant.verb) for grant in grants)
        assert not [g for g in grants if g.verb in ("impersonate", "escalate", "bind", "deletecollection")]
        assert not [g for g in grants if g.group == "rbac.authorization.k8s.io"]
        assert not [g for g in grants if g.resource in ("pods/exec", "nodes/proxy", "serviceaccounts/token")]
        writes = [g for g in grants if g.verb not in ("get", "list", "watch")]
        assert {namespace_of(g) for g in writes if not g.names} <= {FUNCTION_NAMESPACE}
    assert kube.access.granted("keystage-keysmanager", SYSTEM_NAMESPACE) == set()
    assert kube.access.granted("default", FUNCTION_NAMESPACE) == set()


def namespace_of(grant: Grant) -> str:
    return grant.role.split("/")[1]

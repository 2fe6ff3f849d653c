"""The fake cluster's own parts: who plays nodes, what is counted of rights, what faults do."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kubernetes.client import CoreV1Api, CustomObjectsApi
from kubernetes.watch import Watch
from support.kube.access import Grant
from support.kube.answers import Object, Refused
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube
from support.kube.fixtures import kube as kube
from support.kube.quantities import canonical, value_of
from support.kube.subresources import is_ready

from keystage.kubernetes.client import DEPLOYMENTS, FUNCTIONS, NODES, PODS, SECRETS, SERVICES, Cluster
from keystage.kubernetes.errors import ClusterUnavailable, Forbidden, NotFound

UNSCHEDULED = "0/2 nodes are available: "


def pod(name: str, **spec: Any) -> Object:
    container = {"name": "function", "image": "x:1", "resources": spec.pop("resources", {})}
    return {"metadata": {"name": name, "labels": {"app": name}}, "spec": {"containers": [container], **spec}}


def affinity(node: str, *, is_required: bool = True) -> Object:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    if is_required:
        terms = {"nodeSelectorTerms": [term]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    preferred = [{"weight": 100, "preference": term}]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def placed(kube: Kube, **spec: Any) -> tuple[str, str]:
    """Where the scheduler puts such a pod, and what it says where it cannot."""
    cluster = kube.cluster()
    cluster.create(PODS, pod("p", **spec), manager="test")
    kube.scheduler.schedule()
    found = kube.get("pods", "p")
    cluster.delete(PODS, "p", grace_s=0)
    conditions = found["status"].get("conditions", [])
    message = next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")
    return found["spec"].get("nodeName", ""), message


@pytest.fixture
def two(kube: Kube) -> Kube:
    kube.nodes.add("a", cpu="4", labels={"disk": "ssd"}, **{"keystage.dev/gpu0": "80"})
    kube.nodes.add("b", cpu="8")
    return kube


def test_the_emptier_node_is_taken_and_affinity_is_obeyed(two: Kube) -> None:
    assert placed(two)[0] == "b"
    assert placed(two, nodeSelector={"disk": "ssd"})[0] == "a"
    assert placed(two, affinity=affinity("a"))[0] == "a"
    assert placed(two, affinity=affinity("a", is_required=False))[0] == "a"
    node, message = placed(two, affinity=affinity("absent"))
    assert node == ""
    assert message == UNSCHEDULED + "2 node(s) didn't match Pod's node affinity/selector."
    assert placed(two, affinity=affinity("absent", is_required=False))[0] == "b"


def test_room_taints_and_cordons_are_obeyed(two: Kube) -> None:
    gpu = {"limits": {"keystage.dev/gpu0": "60"}}
    assert placed(two, resources=gpu)[0] == "a"
    assert placed(two, resources={"requests": {"cpu": "9"}})[1] == UNSCHEDULED + "2 Insufficient cpu."
    two.cluster().create(PODS, pod("first", resources=gpu), manager="test")
    two.scheduler.schedule()
    assert "Insufficient keystage.dev/gpu0" in placed(two, resources=gpu)[1]
    two.nodes.cordon("b")
    assert placed(two)[0] == "a"
    two.nodes.taint("a", {"key": "k", "value": "v", "effect": "NoSchedule"})
    assert placed(two)[0] == ""
    assert placed(two, tolerations=[{"key": "k", "operator": "Exists"}])[0] == "a"
    two.nodes.cordon("b", is_cordoned=False)
    two.nodes.lose("b")
    assert placed(two)[0] == ""


def deployment(replicas: int, image: str = "x:1", **strategy: Any) -> Object:
    template = {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [{"name": "c", "image": image}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "d"}}, "template": template}
    if strategy:
        spec["strategy"] = strategy
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}


def images(kube: Kube) -> list[str]:
    return sorted(p["spec"]["containers"][0]["image"] for p in kube.list("pods"))


def test_a_deployment_rolls_without_a_gap(two: Kube) -> None:
    cluster = two.cluster()
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    cluster.apply(DEPLOYMENTS, "d", deployment(2, **rolling), manager="test")
    for _ in range(4):
        two.players.step()
    assert images(two) == ["x:1", "x:1"]
    assert two.get("deployments", "d")["status"]["availableReplicas"] == 2
    cluster.apply(DEPLOYMENTS, "d", deployment(2, "x:2", **rolling), manager="test")
    for _ in range(20):
        two.players.step()
        pods = two.list("pods")
        assert len(pods) <= 3
        assert sum(is_ready(p) and "deletionTimestamp" not in p["metadata"] for p in pods) >= 2
    assert images(two) == ["x:2", "x:2"]
    assert len(two.list("replicasets")) == 1


def test_a_deployment_that_recreates_has_never_two(two: Kube) -> None:
    cluster = two.cluster()
    cluster.apply(DEPLOYMENTS, "d", deployment(1, type="Recreate"), manager="test")
    for _ in range(4):
        two.players.step()
    cluster.apply(DEPLOYMENTS, "d", deployment(1, "x:2", type="Recreate"), manager="test")
    for _ in range(10):
        two.players.step()
        assert len(two.list("pods")) <= 1
    assert images(two) == ["x:2"]
    cluster.delete(DEPLOYMENTS, "d")
    two.until(lambda: not two.list("replicasets"), what="its set is collected")


def test_pods_go_through_their_states(two: Kube) -> None:
    two.cluster().create(PODS, pod("p"), manager="test")
    two.scheduler.schedule()
    assert two.kubelet.run("p")["status"]["phase"] == "Running"
    assert not is_ready(two.get("pods", "p"))
    ready = two.kubelet.ready("p")
    assert is_ready(ready)
    assert ready["status"]["podIP"].startswith("127.")
    assert ready["status"]["containerStatuses"][0]["state"]["running"]
    assert not is_ready(two.kubelet.unready("p"))
    crashed = two.kubelet.crash("p", "OOMKilled", exit_code=137)["status"]["containerStatuses"][0]
    assert crashed["restartCount"] == 1
    assert crashed["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert two.kubelet.fail("p")["status"]["phase"] == "Failed"
    two.cluster().delete(PODS, "p")
    with pytest.raises(Refused):
        two.get("pods", "p")


def test_a_namespace_goes_with_all_it_holds(kube: Kube) -> None:
    body = {"metadata": {"name": "s"}, "stringData": {"k": "v"}}
    kube.cluster().create(SECRETS, body, manager="test")
    kube.delete("namespaces", FUNCTION_NAMESPACE)
    kube.until(lambda: not kube.list("secrets"))
    with pytest.raises((NotFound, Forbidden)):
        kube.cluster().create(SECRETS, body, manager="test")


def test_functions_go_with_their_definition(kube: Kube) -> None:
    body = {
        "apiVersion": "keystage.dev/v1",
        "kind": "Function",
        "metadata": {"name": "f"},
        "spec": {"image": "i"},
    }
    kube.cluster().create(FUNCTIONS, body, manager="test")
    kube.delete("customresourcedefinitions", "functions.keystage.dev")
    kube.until(lambda: not kube.list("functions"))


RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["services"], "verbs": ["delete"]},
]


def bound(kube: Kube) -> Cluster:
    subject = {"kind": "ServiceAccount", "name": "me", "namespace": SYSTEM_NAMESPACE}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "me"}
    version = "rbac.authorization.k8s.io/v1"
    meta = {"name": "me", "namespace": FUNCTION_NAMESPACE}
    kube.load(
        {"apiVersion": version, "kind": "Role", "metadata": meta, "rules": RULES},
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": ref,
            "subjects": [subject],
        },
    )
    return kube.cluster(service_account="me")


def test_rights_are_counted_by_use(kube: Kube) -> None:
    cluster = bound(kube)
    role = f"Role/{FUNCTION_NAMESPACE}/me"
    cluster.list(PODS)
    assert kube.access.unused("me", SYSTEM_NAMESPACE) == {
        Grant(role, "", "pods", "get"),
        Grant(role, "", "services", "delete"),
    }
    with pytest.raises(NotFound):
        cluster.delete(SERVICES, "absent")
    assert kube.access.unused("me", SYSTEM_NAMESPACE) == {Grant(role, "", "pods", "get")}
    assert kube.access.denied() == []
    with pytest.raises(Forbidden, match="cannot list resource"):
        cluster.within(SYSTEM_NAMESPACE).list(PODS)
    with pytest.raises(Forbidden, match="at the cluster scope"):
        cluster.list(NODES)
    assert [(d.asked.resource, d.asked.namespace) for d in kube.access.denied()] == [
        ("pods", SYSTEM_NAMESPACE),
        ("nodes", ""),
    ]


def test_faults_hit_what_they_name_and_as_often(kube: Kube) -> None:
    cluster = kube.cluster()
    kube.faults.fail(2, code=503, verb="list", resource="pods")
    assert cluster.list(FUNCTIONS).items == []
    for _ in range(2):
        with pytest.raises(ClusterUnavailable):
            cluster.list(PODS)
    assert cluster.list(PODS).items == []


def test_a_mute_watch_says_nothing(kube: Kube) -> None:
    cluster = kube.cluster()
    kube.face.bookmark_s = 0.05
    kube.faults.is_mute = True
    version = cluster.list(PODS).version
    cluster.create(PODS, pod("p"), manager="test")
    with pytest.raises(ClusterUnavailable, match="timed out"):  # it does not even end
        list(cluster.watch(PODS, version, timeout_s=1, silence_s=0.2))
    kube.faults.clear()
    assert next(iter(cluster.watch(PODS, version))).type == "ADDED"


def test_what_was_there_is_there_after_an_outage(kube: Kube) -> None:
    cluster = kube.cluster()
    cluster.create(PODS, pod("p"), manager="test")
    with kube.outage(), pytest.raises(ClusterUnavailable):
        cluster.get(PODS, "p")
    assert cluster.get(PODS, "p")["metadata"]["name"] == "p"


def test_the_official_client_reads_it(kube: Kube) -> None:
    api = kube.api_client()
    core = CoreV1Api(api)
    assert core.list_namespaced_pod(FUNCTION_NAMESPACE).items == []
    kube.cluster().create(PODS, pod("p"), manager="test")
    assert core.read_namespaced_pod("p", FUNCTION_NAMESPACE).status.phase == "Pending"
    stream = Watch().stream(core.list_namespaced_pod, FUNCTION_NAMESPACE, timeout_seconds=1)
    assert [(event["type"], event["object"].metadata.name) for event in stream] == [("ADDED", "p")]
    listed = CustomObjectsApi(api).list_namespaced_custom_object(
        "keystage.dev", "v1", FUNCTION_NAMESPACE, "functions"
    )
    assert listed["kind"] == "FunctionList"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1024Mi", "1Gi"),
        ("1000Mi", "1000Mi"),
        ("1.5Gi", "1536Mi"),
        ("0", "0"),
    ],
)
def test_quantities_are_written_in_one_form(given: str, told: str) -> None:
    assert canonical(given) == told
    assert value_of(given) == value_of(told)


def test_waiting_is_bounded(kube: Kube) -> None:
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"not so after 0\.1 s: nothing"):
        kube.until(lambda: kube.get("pods", "absent"), timeout_s=0.1, what="nothing")
    assert time.monotonic() - began_s < 5

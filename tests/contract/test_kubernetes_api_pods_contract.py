"""What Keystage relies on in a Kubernetes API server: subresources, pods.

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

from typing import Any

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, name_of, world

from keystage.kubernetes.client import DEPLOYMENTS, FUNCTIONS, PODS
from keystage.kubernetes.errors import Forbidden, Invalid

__all__ = ["world"]
MERGE = "application/merge-patch+json"


def condition(pod: Object, kind: str) -> Object:
    return next((c for c in pod["status"].get("conditions", ()) if c["type"] == kind), {})


# --- status


def test_status_is_written_apart_from_the_rest(world: World) -> None:
    item = world.made()
    patch = {"metadata": {"labels": {"a": "1"}}, "spec": {"image": "other"}, "status": {"desired": 3}}
    item = world.cluster.patch(FUNCTIONS, name_of(item), patch, manager="controller", subresource="status")
    assert item["status"] == {"desired": 3}
    assert item["spec"] == {"image": "image:1"}
    assert item["metadata"]["generation"] == 1
    assert "labels" not in item["metadata"]
    item = world.cluster.patch(FUNCTIONS, name_of(item), {**patch, "status": {"desired": 9}}, manager="test")
    assert item["status"] == {"desired": 3}
    assert item["spec"] == {"image": "other"}
    assert item["metadata"]["labels"] == {"a": "1"}
    assert item["metadata"]["generation"] == 2


def test_labels_and_annotations_are_no_generation(world: World) -> None:
    item = world.made()
    patch = {"metadata": {"labels": {"a": "1"}, "annotations": {"keystage.dev/wake": "1.5"}}}
    newer = world.cluster.patch(FUNCTIONS, name_of(item), patch, manager="test")
    assert newer["metadata"]["generation"] == 1
    assert int(newer["metadata"]["resourceVersion"]) > int(item["metadata"]["resourceVersion"])


def test_applied_status_belongs_to_its_manager(world: World) -> None:
    item = world.made()
    body = {"apiVersion": "keystage.dev/v1", "kind": "Function", "metadata": {"name": name_of(item)}}
    full = {**body, "status": {"desired": 2, "ready": 1, "trouble": ["a", "b"]}}
    world.cluster.apply(FUNCTIONS, name_of(item), full, manager="controller", subresource="status")
    less = {**body, "status": {"desired": 2}}
    item = world.cluster.apply(FUNCTIONS, name_of(item), less, manager="controller", subresource="status")
    assert item["status"] == {"desired": 2}
    entry = next(e for e in item["metadata"]["managedFields"] if e["manager"] == "controller")
    assert (entry["operation"], entry["subresource"]) == ("Apply", "status")
    assert entry["fieldsV1"] == {"f:status": {"f:desired": {}}}


def test_status_is_held_against_the_schema(world: World) -> None:
    name = name_of(world.made())
    with pytest.raises(Invalid, match=r"status.desired"):
        world.cluster.patch(FUNCTIONS, name, {"status": {"desired": -1}}, manager="x", subresource="status")
    item = world.cluster.patch(
        FUNCTIONS, name, {"status": {"cores": 1.5, "unknown": 1}}, manager="x", subresource="status"
    )
    assert item["status"] == {"cores": 1.5}


# --- scale


def test_scale_of_a_function_is_its_wish(world: World) -> None:
    item = world.made(replicas=2)
    status = {"status": {"replicas": 1, "selector": "keystage.dev/function=x"}}
    world.cluster.patch(FUNCTIONS, name_of(item), status, manager="x", subresource="status")
    path = world.path(FUNCTIONS, name_of(item), "scale")
    code, scale = world.raw("GET", path)
    assert (code, scale["kind"], scale["apiVersion"]) == (200, "Scale", "autoscaling/v1")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": "keystage.dev/function=x"}
    code, scale = world.raw("PATCH", path, {"spec": {"replicas": 4}}, content=MERGE)
    assert (code, scale["spec"]) == (200, {"replicas": 4})
    item = world.cluster.get(FUNCTIONS, name_of(item))
    assert (item["spec"]["replicas"], item["metadata"]["generation"]) == (4, 2)
    scale["metadata"]["resourceVersion"] = "1"
    code, body = world.raw("PUT", path, scale)
    assert (code, body["reason"]) == (409, "Conflict")


def test_scale_of_a_function_without_a_wish(world: World) -> None:
    item = world.made()
    path = world.path(FUNCTIONS, name_of(item), "scale")
    code, body = world.raw("GET", path)
    assert (code, body["reason"]) == (500, "InternalError")
    code, _ = world.raw("PATCH", path, {"spec": {"replicas": 1}}, content=MERGE)
    assert code == 200
    assert world.cluster.get(FUNCTIONS, name_of(item))["spec"]["replicas"] == 1
    code, _ = world.raw("PATCH", path, {"spec": {"replicas": -1}}, content=MERGE)
    assert code == 422


def test_scale_of_a_deployment(world: World) -> None:
    name, labels = world.name("d"), {"app": "x"}
    template = {"metadata": {"labels": labels}, "spec": world.pod()["spec"]}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    body = {"metadata": {"name": name}, "spec": spec}
    wrong = {**spec, "selector": {"matchLabels": {"app": "y"}}}
    with pytest.raises(Invalid, match=r"does not match template"):
        world.cluster.create(DEPLOYMENTS, {**body, "spec": wrong}, manager="test")
    item = world.cluster.create(DEPLOYMENTS, body, manager="test")
    assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": "25%"}
    code, scale = world.raw("GET", world.path(DEPLOYMENTS, name, "scale"))
    assert code == 200
    assert "replicas" not in scale["spec"]
    assert scale["status"]["selector"] == "app=x"


# --- pods


def test_a_pod_begins_pending_and_its_spec_stays(world: World) -> None:
    pod = world.made_pod()
    assert pod["status"]["phase"] == "Pending"
    assert pod["status"]["qosClass"] == "BestEffort"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 30
    assert pod["spec"]["restartPolicy"] == "Always"
    assert pod["spec"]["serviceAccountName"] == "default"
    with pytest.raises(Invalid, match="pod updates may not change fields other than"):
        world.cluster.patch(PODS, name_of(pod), {"spec": {"hostname": "x"}}, manager="test")
    pod = world.cluster.patch(PODS, name_of(pod), {"metadata": {"labels": {"a": "1"}}}, manager="test")
    assert pod["metadata"]["labels"] == {"a": "1"}


def test_binding_is_said_once(world: World) -> None:
    pod = world.bound_pod()
    assert pod["spec"]["nodeName"] == world.node
    assert pod["metadata"]["generation"] == 1
    assert condition(pod, "PodScheduled")["status"] == "True"
    status, body = world.raw("POST", world.path(PODS, name_of(pod), "binding"), world.binding(name_of(pod)))
    assert (status, body["reason"]) == (409, "Conflict")
    assert "is already assigned to node" in body["message"]


def test_pods_are_selected_by_node_phase_and_labels(world: World) -> None:
    pod = world.bound_pod()
    name = name_of(pod)
    world.cluster.patch(PODS, name, {"metadata": {"labels": {"role": "stage", "n": name}}}, manager="test")
    world.cluster.patch(PODS, name, {"status": {"phase": "Running"}}, manager="x", subresource="status")

    def names(**given: str) -> list[str]:
        return [name_of(p) for p in world.cluster.list(PODS, **given).items]

    assert name in names(fields=f"spec.nodeName={world.node}")
    assert names(fields=f"metadata.name={name},status.phase=Running") == [name]
    assert name not in names(fields="status.phase!=Running")
    assert names(labels=f"n={name},role in (stage, router)") == [name]
    assert names(labels=f"n={name},role notin (stage)") == []
    assert names(labels=f"n={name},role,!absent") == [name]
    assert names(labels=f"n={name},!role") == []
    with pytest.raises(Invalid, match="field label not supported"):
        names(fields="spec.hostname=x")
    with pytest.raises(Invalid, match="unable to parse requirement"):
        names(labels="a b")


def test_a_pods_status_does_not_touch_its_spec(world: World) -> None:
    pod = world.bound_pod()
    patch = {
        "spec": {"nodeName": "other"},
        "status": {"podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}], "phase": "Running"},
    }
    pod = world.cluster.patch(PODS, name_of(pod), patch, manager="kubelet", subresource="status")
    assert pod["spec"]["nodeName"] == world.node
    assert pod["status"]["podIP"] == "10.1.2.3"


def resized(world: World, **resources: Any) -> tuple[Object, Any]:
    container = {"name": "function", "image": "x", "resources": resources}
    pod = world.bound_pod(containers=[container])

    def resize(**wanted: Any) -> Object:
        patch = {"spec": {"containers": [{"name": "function", "resources": wanted}]}}
        return world.cluster.patch_strategic(
            PODS, name_of(pod), patch, manager="controller", subresource="resize"
        )

    return pod, resize


def test_resize_changes_cpu_in_place(world: World) -> None:
    pod, resize = resized(world, requests={"cpu": "1"}, limits={"cpu": "2"})
    newer = resize(requests={"cpu": "2"}, limits={"cpu": "2500m"})
    assert newer["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "2"},
        "limits": {"cpu": "2500m"},
    }
    assert newer["metadata"]["generation"] == pod["metadata"]["generation"] + 1
    assert newer["status"]["qosClass"] == "Burstable"


def test_resize_keeps_the_class_and_takes_nothing_away(world: World) -> None:
    both = {"cpu": "1", "memory": "64Mi"}
    _, resize = resized(world, requests=both, limits=both)
    with pytest.raises(Invalid, match="Pod QOS Class may not change as a result of resizing"):
        resize(requests={"cpu": "500m"})
    newer = resize(requests={"cpu": "2"}, limits={"cpu": "2"})
    assert newer["status"]["qosClass"] == "Guaranteed"
    _, resize = resized(world, requests={"cpu": "1"})
    with pytest.raises(Invalid):
        resize(requests={"cpu": None})


def test_resize_beyond_the_whole_node_is_refused_at_once(world: World) -> None:
    _, resize = resized(world, requests={"cpu": "1"})
    with pytest.raises(
        Forbidden, match="node didn't have enough allocatable resources: cpu, requested: 9000"
    ):
        resize(requests={"cpu": "9"})


def test_resources_change_only_through_resize(world: World) -> None:
    pod, _ = resized(world, requests={"cpu": "1"})
    patch = {"spec": {"containers": [{"name": "function", "resources": {"requests": {"cpu": "2"}}}]}}
    with pytest.raises(Invalid, match="pod updates may not change fields"):
        world.cluster.patch_strategic(PODS, name_of(pod), patch, manager="test")


def test_output_of_a_pod_that_has_not_begun(world: World) -> None:
    pod = world.made_pod(containers=[{"name": n, "image": "x"} for n in ("a", "b")])
    path = world.path(PODS, name_of(pod), "log")
    status, body = world.raw("GET", path)
    assert (status, body["reason"]) == (400, "BadRequest")
    assert "a container name must be specified for pod" in body["message"]
    status, body = world.raw("GET", path, query={"container": "c"})
    assert (status, body["reason"]) == (400, "BadRequest")
    assert "container c is not valid for pod" in body["message"]
    status, _ = world.raw("GET", world.path(PODS, "absent", "log"))
    assert status == 404

"""What Keystage relies on in a Kubernetes API server: field ownership (server-side apply).

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, world

from keystage.kubernetes.client import DEPLOYMENTS, FUNCTIONS
from keystage.kubernetes.errors import Conflict, Invalid, NotFound

__all__ = ["world"]
APPLY = "application/apply-patch+yaml"


def managers(item: Object) -> set[tuple[str, str, str]]:
    return {
        (e["manager"], e["operation"], e.get("subresource", "")) for e in item["metadata"]["managedFields"]
    }


def test_apply_makes_then_changes_and_says_which(world: World) -> None:
    name = world.name("f")
    query = {"fieldManager": "one"}
    path = world.path(FUNCTIONS, name)
    status, item = world.raw("PATCH", path, world.function(name), content=APPLY, query=query)
    assert (status, item["metadata"]["generation"]) == (201, 1)
    assert managers(item) == {("one", "Apply", "")}
    status, again = world.raw("PATCH", path, world.function(name), content=APPLY, query=query)
    assert status == 200
    assert again == item
    status, newer = world.raw(
        "PATCH", path, world.function(name, image="image:2"), content=APPLY, query=query
    )
    assert (status, newer["metadata"]["generation"]) == (200, 2)


def test_apply_takes_away_what_the_manager_no_longer_applies(world: World) -> None:
    name = world.name("f")
    world.cluster.apply(
        FUNCTIONS, name, world.function(name, envVars={"A": "1", "B": "2"}, replicas=2), manager="one"
    )
    world.cluster.patch(FUNCTIONS, name, {"spec": {"envVars": {"C": "3"}}}, manager="two")
    item = world.cluster.apply(FUNCTIONS, name, world.function(name, envVars={"B": "2"}), manager="one")
    assert item["spec"] == {"image": "image:1", "envVars": {"B": "2", "C": "3"}}


def test_a_wish_survives_a_redeploy_by_another_manager(world: World) -> None:
    name = world.name("f")
    world.cluster.apply(FUNCTIONS, name, world.function(name), manager="keystage-gateway")
    wish = {**world.function(name), "spec": {"replicas": 3}}
    wish["metadata"] = {"name": name, "annotations": {"keystage.dev/override-until": "9"}}
    world.cluster.apply(FUNCTIONS, name, wish, manager="keystage-scale")
    item = world.cluster.apply(
        FUNCTIONS, name, world.function(name, image="image:2"), manager="keystage-gateway"
    )
    assert item["spec"] == {"image": "image:2", "replicas": 3}
    assert item["metadata"]["annotations"] == {"keystage.dev/override-until": "9"}
    empty = {**world.function(name), "spec": {}}
    item = world.cluster.apply(FUNCTIONS, name, empty, manager="keystage-scale")
    assert item["spec"] == {"image": "image:2"}
    assert "annotations" not in item["metadata"]


def test_a_wish_for_a_function_that_is_gone_makes_none(world: World) -> None:
    wish = {**world.function("gone"), "spec": {"replicas": 3}}
    with pytest.raises(Invalid, match=r"spec.image: Required value"):
        world.cluster.apply(FUNCTIONS, "gone", wish, manager="keystage-scale")
    with pytest.raises(NotFound):
        world.cluster.apply(
            FUNCTIONS, "gone", {**wish, "status": {"desired": 1}}, manager="x", subresource="status"
        )


def test_apply_conflicts_name_field_and_manager(world: World) -> None:
    name = world.name("f")
    world.cluster.apply(FUNCTIONS, name, world.function(name), manager="one")
    other = world.function(name, image="image:2")
    path, query = world.path(FUNCTIONS, name), {"fieldManager": "two", "force": "false"}
    status, body = world.raw("PATCH", path, other, content=APPLY, query=query)
    assert (status, body["reason"]) == (409, "Conflict")
    assert body["message"] == 'Apply failed with 1 conflict: conflict with "one": .spec.image'
    cause = {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".spec.image"}
    assert body["details"]["causes"] == [cause]
    same = world.cluster.apply(FUNCTIONS, name, world.function(name), manager="two", force=False)
    assert managers(same) == {("one", "Apply", ""), ("two", "Apply", "")}  # one value may have two owners
    item = world.cluster.apply(FUNCTIONS, name, other, manager="two", force=True)
    assert item["spec"]["image"] == "image:2"
    assert managers(item) == {("two", "Apply", "")}


def test_a_plain_patch_takes_a_field_from_its_owner(world: World) -> None:
    name = world.name("f")
    world.cluster.apply(FUNCTIONS, name, world.function(name, replicas=1), manager="one")
    item = world.cluster.patch(FUNCTIONS, name, {"spec": {"replicas": 5}}, manager="two")
    assert managers(item) == {("one", "Apply", ""), ("two", "Update", "")}
    item = world.cluster.apply(FUNCTIONS, name, world.function(name), manager="one")
    assert item["spec"]["replicas"] == 5
    with pytest.raises(Conflict, match=r'conflict with "two" using keystage\.dev/v1'):
        world.cluster.apply(FUNCTIONS, name, world.function(name, replicas=1), manager="one", force=False)


def test_apply_with_an_old_version_or_without_a_manager(world: World) -> None:
    name = world.name("f")
    item = world.cluster.apply(FUNCTIONS, name, world.function(name), manager="one")
    world.cluster.patch(FUNCTIONS, name, {"spec": {"replicas": 1}}, manager="two")
    old = world.function(name, image="image:2")
    old["metadata"]["resourceVersion"] = item["metadata"]["resourceVersion"]
    with pytest.raises(Conflict, match="the object has been modified"):
        world.cluster.apply(FUNCTIONS, name, old, manager="one")
    status, body = world.raw("PATCH", world.path(FUNCTIONS, name), world.function(name), content=APPLY)
    assert status in (400, 422)
    assert "fieldManager" in body["message"]


def test_apply_finds_containers_environment_and_ports_by_key(world: World) -> None:
    name = world.name("d")

    def deployment(manager: str, env: dict[str, str]) -> Object:
        listed = [{"name": k, "value": v} for k, v in env.items()]
        ports = [{"containerPort": 8080}]
        container = {"name": "function", "image": "none.invalid/x:1", "env": listed, "ports": ports}
        labels = {"app": name}
        spec = {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        }
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        return world.cluster.apply(DEPLOYMENTS, name, body, manager=manager)

    first = deployment("one", {"A": "1", "B": "2"})
    assert first["metadata"]["generation"] == 1
    again = deployment("one", {"A": "1", "B": "2"})
    assert again["metadata"]["generation"] == 1
    assert again["metadata"]["managedFields"][0] == first["metadata"]["managedFields"][0]
    deployment("two", {"C": "3"})
    item = deployment("one", {"B": "2"})
    container = item["spec"]["template"]["spec"]["containers"][0]
    assert {e["name"]: e["value"] for e in container["env"]} == {"B": "2", "C": "3"}
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]

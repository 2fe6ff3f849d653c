"""What Keystage relies on in a Kubernetes API server: deletion, owners, rights.

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, name_of, world

from keystage.kubernetes.client import FUNCTIONS, PODS, Cluster, Kind
from keystage.kubernetes.errors import Conflict, Invalid, NotFound

__all__ = ["world"]
ACCOUNTS = Kind("v1", "serviceaccounts")
ROLES = Kind("rbac.authorization.k8s.io/v1", "roles")
BINDINGS = Kind("rbac.authorization.k8s.io/v1", "rolebindings")
BUDGETS = Kind("policy/v1", "poddisruptionbudgets")
MERGE = "application/merge-patch+json"
ELSEWHERE = "00000000-0000-0000-0000-000000000000"


def test_a_custom_resource_is_gone_at_once_and_only_if_it_is_that_one(world: World) -> None:
    item = world.made()
    with pytest.raises(Conflict, match=r"the UID in the precondition .* does not match the UID in record"):
        world.cluster.delete(FUNCTIONS, name_of(item), uid=ELSEWHERE)
    status, body = world.raw("DELETE", world.path(FUNCTIONS, name_of(item)))
    assert (status, body["status"]) == (200, "Success")
    assert body["details"]["uid"] == item["metadata"]["uid"]
    assert world.is_gone(FUNCTIONS, name_of(item))


def test_a_pod_that_is_nowhere_is_gone_at_once(world: World) -> None:
    pod = world.made_pod()
    world.cluster.delete(PODS, name_of(pod))
    assert world.is_gone(PODS, name_of(pod))


def test_a_pod_leaves_with_grace_until_its_kubelet_agrees(world: World) -> None:
    pod = world.bound_pod(terminationGracePeriodSeconds=65)
    name = name_of(pod)
    world.cluster.delete(PODS, name, uid=pod["metadata"]["uid"])
    leaving = world.cluster.get(PODS, name)
    assert leaving["metadata"]["deletionTimestamp"].endswith("Z")
    assert leaving["metadata"]["deletionGracePeriodSeconds"] == 65
    world.cluster.delete(PODS, name, grace_s=5)
    assert world.cluster.get(PODS, name)["metadata"]["deletionGracePeriodSeconds"] == 5
    world.cluster.delete(PODS, name, grace_s=50)
    assert world.cluster.get(PODS, name)["metadata"]["deletionGracePeriodSeconds"] == 5
    with pytest.raises(Conflict):
        world.cluster.delete(PODS, name, uid=ELSEWHERE, grace_s=0)
    world.cluster.delete(PODS, name, grace_s=0)
    assert world.is_gone(PODS, name)


def test_a_pod_that_ended_is_gone_at_once(world: World) -> None:
    pod = world.bound_pod()
    world.cluster.patch(
        PODS, name_of(pod), {"status": {"phase": "Failed"}}, manager="kubelet", subresource="status"
    )
    world.cluster.delete(PODS, name_of(pod))
    assert world.is_gone(PODS, name_of(pod))


def test_finalizers_hold_an_object(world: World) -> None:
    item = world.made()
    name = name_of(item)
    world.cluster.patch(FUNCTIONS, name, {"metadata": {"finalizers": ["keystage.dev/test"]}}, manager="test")
    world.cluster.delete(FUNCTIONS, name)
    assert "deletionTimestamp" in world.cluster.get(FUNCTIONS, name)["metadata"]
    world.cluster.patch(FUNCTIONS, name, {"metadata": {"finalizers": None}}, manager="test")
    assert world.is_gone(FUNCTIONS, name)


def owned_pod(world: World, owner: Object, *, uid: str = "") -> str:
    body = world.pod()
    body["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "keystage.dev/v1",
            "kind": "Function",
            "name": name_of(owner),
            "uid": uid or owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]
    return name_of(world.cluster.create(PODS, body, manager="test"))


def test_pods_go_with_their_function(world: World) -> None:
    first, second = world.made(), world.made()
    mine, others = owned_pod(world, first), owned_pod(world, second)
    world.cluster.delete(FUNCTIONS, name_of(first))
    world.until(lambda: world.is_gone(PODS, mine), timeout_s=60)
    assert not world.is_gone(PODS, others)


def test_a_pod_of_a_function_that_was_replaced_goes_too(world: World) -> None:
    name = owned_pod(world, world.made(), uid=ELSEWHERE)
    world.until(lambda: world.is_gone(PODS, name), timeout_s=60)


def test_an_object_has_one_controller(world: World) -> None:
    body, function = world.pod(), world.made()
    owner = {"apiVersion": "keystage.dev/v1", "kind": "Function", "name": "x", "controller": True}
    body["metadata"]["ownerReferences"] = [
        {**owner, "uid": function["metadata"]["uid"]},
        {**owner, "uid": ELSEWHERE},
    ]
    with pytest.raises(Invalid, match="Only one reference can have Controller set to true"):
        world.cluster.create(PODS, body, manager="test")


# --- rights


def account(world: World, *rules: Object) -> tuple[str, str]:
    name = world.name("account")
    world.cluster.create(ACCOUNTS, {"metadata": {"name": name}}, manager="test")
    world.cluster.create(ROLES, {"metadata": {"name": name}, "rules": list(rules)}, manager="test")
    body = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": world.namespace}],
    }
    world.cluster.create(BINDINGS, body, manager="test")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": None}}
    status, told = world.raw("POST", world.path(ACCOUNTS, name, "token"), request)
    assert status == 201
    return f"system:serviceaccount:{world.namespace}:{name}", told["status"]["token"]


def test_a_service_account_may_what_its_roles_say(world: World) -> None:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "get"]},
        {"apiGroups": ["keystage.dev"], "resources": ["functions/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["one"], "verbs": ["get"]},
    ]
    user, token = account(world, *rules)
    world.until(lambda: world.raw("GET", world.path(PODS), token=token)[0] == 200)
    status, body = world.raw("GET", world.path(PODS), token=token, query={"watch": "true"})
    assert (status, body["reason"]) == (403, "Forbidden")
    where = f'in the namespace "{world.namespace}"'
    assert body["message"] == (
        f'pods is forbidden: User "{user}" cannot watch resource "pods" in API group "" {where}'
    )
    function = name_of(world.made())
    status, body = world.raw("PATCH", world.path(FUNCTIONS, function), {}, content=MERGE, token=token)
    assert status == 403
    assert body["message"] == (
        f'functions.keystage.dev "{function}" is forbidden: User "{user}" cannot patch resource "functions" '
        f'in API group "keystage.dev" {where}'
    )
    status, _ = world.raw(
        "PATCH", world.path(FUNCTIONS, function, "status"), {"status": {}}, content=MERGE, token=token
    )
    assert status == 200
    pod = name_of(world.made_pod())
    status, body = world.raw("PATCH", world.path(PODS, pod, "resize"), {}, content=MERGE, token=token)
    assert 'cannot patch resource "pods/resize"' in body["message"]
    secrets = Kind("v1", "secrets")
    assert world.raw("GET", world.path(secrets, "one"), token=token)[0] == 404
    assert world.raw("GET", world.path(secrets, "two"), token=token)[0] == 403
    status, body = world.raw("GET", "/api/v1/nodes", token=token)
    assert "at the cluster scope" in body["message"]


def test_an_apply_that_makes_an_object_needs_both_rights(world: World) -> None:
    rule: Object = {"apiGroups": ["keystage.dev"], "resources": ["functions"], "verbs": ["patch"]}
    user, token = account(world, rule)
    name, query = name_of(world.made()), {"fieldManager": "test"}
    content = "application/apply-patch+yaml"

    def apply(name: str) -> tuple[int, Object]:
        body = world.function(name)
        return world.raw(
            "PATCH", world.path(FUNCTIONS, name), body, content=content, query=query, token=token
        )

    world.until(lambda: apply(name)[0] == 200)
    status, body = apply("new")
    assert status == 403
    assert f'User "{user}" cannot create resource "functions"' in body["message"]


def test_a_token_that_nobody_has(world: World) -> None:
    status, body = world.raw("GET", world.path(PODS), token="nobody")
    assert (status, body["reason"], body["message"]) == (401, "Unauthorized", "Unauthorized")


def test_eviction_asks_the_disruption_budget(world: World) -> None:
    labels = {"budget": world.name("b")}
    body = world.pod()
    body["metadata"]["labels"] = labels
    name = name_of(world.cluster.create(PODS, body, manager="test"))
    spec = {"minAvailable": 1, "selector": {"matchLabels": labels}}
    world.cluster.create(BUDGETS, {"metadata": {"name": labels["budget"]}, "spec": spec}, manager="test")
    world.raw("POST", world.path(PODS, name, "binding"), world.binding(name))
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    world.cluster.patch(PODS, name, {"status": status}, manager="kubelet", subresource="status")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    code, told = world.raw("POST", world.path(PODS, name, "eviction"), eviction)
    assert (code, told["reason"]) == (429, "TooManyRequests")
    world.cluster.delete(BUDGETS, labels["budget"])
    code, _ = world.raw("POST", world.path(PODS, name, "eviction"), eviction)
    assert code == 201
    assert "deletionTimestamp" in world.cluster.get(PODS, name)["metadata"]


def test_cluster_facade_of_another_namespace_sees_nothing_of_this(world: World) -> None:
    name = name_of(world.made())
    elsewhere = Cluster(world.api, "default")
    with pytest.raises(NotFound):
        elsewhere.get(FUNCTIONS, name)

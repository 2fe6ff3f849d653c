"""What Keystage relies on in a Kubernetes API server: objects, versions, patches, field ownership, errors.

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

import copy

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, name_of, world

from keystage.kubernetes.client import FUNCTIONS, LEASES, PODS, SECRETS, SERVICES, Kind
from keystage.kubernetes.errors import Conflict, Invalid, NotFound

__all__ = ["world"]
MERGE = "application/merge-patch+json"


# --- objects and versions


def test_create_gives_identity_and_the_next_version(world: World) -> None:
    first, second = world.made(), world.made()
    meta = first["metadata"]
    assert meta["uid"] != second["metadata"]["uid"]
    assert meta["namespace"] == world.namespace
    assert meta["creationTimestamp"].endswith("Z")
    assert meta["generation"] == 1
    assert int(meta["resourceVersion"]) < int(second["metadata"]["resourceVersion"])
    assert world.cluster.get(FUNCTIONS, name_of(first)) == first


def test_create_twice_is_a_conflict_by_name(world: World) -> None:
    name = name_of(world.made())
    status, body = world.raw("POST", world.path(FUNCTIONS), world.function(name))
    assert status == body["code"] == 409
    assert (body["kind"], body["status"], body["reason"]) == ("Status", "Failure", "AlreadyExists")
    assert body["message"] == f'functions.keystage.dev "{name}" already exists'
    assert body["details"] == {"name": name, "group": "keystage.dev", "kind": "functions"}


def test_what_is_not_there_is_not_found(world: World) -> None:
    status, body = world.raw("GET", world.path(FUNCTIONS, "absent"))
    assert (status, body["reason"]) == (404, "NotFound")
    assert body["message"] == 'functions.keystage.dev "absent" not found'
    status, body = world.raw("GET", world.path(PODS, "absent"))
    assert body["message"] == 'pods "absent" not found'
    assert body["details"] == {"name": "absent", "kind": "pods"}
    for method in ("DELETE", "PATCH"):
        body_given = {} if method == "PATCH" else None
        status, _ = world.raw(method, world.path(FUNCTIONS, "absent"), body_given, content=MERGE)
        assert status == 404


def test_a_custom_object_says_its_kind(world: World) -> None:
    body_given = {"metadata": {"name": world.name("f")}, "spec": {"image": "x"}}
    status, body = world.raw("POST", world.path(FUNCTIONS), body_given)
    assert (status, body["reason"]) == (400, "BadRequest")
    assert "is missing" in body["message"]


def test_a_namespace_that_is_not_there_is_not_found(world: World) -> None:
    body_given = world.function("f")
    status, body = world.raw("POST", world.path(FUNCTIONS, namespace="absent"), body_given)
    assert (status, body["message"]) == (404, 'namespaces "absent" not found')
    status, body = world.raw("GET", world.path(FUNCTIONS, namespace="absent"))
    assert (status, body["items"]) == (200, [])


def test_a_generated_name_has_five_more_characters(world: World) -> None:
    body = world.pod()
    body["metadata"] = {"generateName": "stage-"}
    name = name_of(world.cluster.create(PODS, body, manager="test"))
    assert name.startswith("stage-")
    assert len(name) == len("stage-") + 5


def test_put_needs_the_present_version_of_a_custom_resource(world: World) -> None:
    item = world.made()
    changed = copy.deepcopy(item)
    changed["spec"]["image"] = "image:2"
    newer = world.cluster.replace(FUNCTIONS, name_of(item), changed, manager="test")
    assert newer["metadata"]["generation"] == 2
    with pytest.raises(Conflict, match="the object has been modified; please apply your changes"):
        world.cluster.replace(FUNCTIONS, name_of(item), changed, manager="test")
    del changed["metadata"]["resourceVersion"]
    with pytest.raises(Invalid, match="must be specified for an update"):
        world.cluster.replace(FUNCTIONS, name_of(item), changed, manager="test")


def test_a_write_without_a_change_makes_no_version(world: World) -> None:
    item = world.made()
    assert world.cluster.replace(FUNCTIONS, name_of(item), item, manager="test") == item
    same = world.cluster.patch(FUNCTIONS, name_of(item), {"spec": {"image": "image:1"}}, manager="test")
    assert same["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]


def test_two_who_want_a_lease_only_one_gets_it(world: World) -> None:
    name = world.name("lease")
    body = {"metadata": {"name": name}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15}}
    lease = world.cluster.create(LEASES, body, manager="a")
    lease["spec"]["renewTime"] = "2026-01-01T00:00:00.000000Z"
    newer = world.cluster.replace(LEASES, name, lease, manager="a")
    assert newer["spec"]["renewTime"] == "2026-01-01T00:00:00.000000Z"
    assert "generation" not in newer["metadata"]
    lease["spec"]["holderIdentity"] = "b"
    with pytest.raises(Conflict):
        world.cluster.replace(LEASES, name, lease, manager="b")


def test_metadata_alone_can_be_had(world: World) -> None:
    name = world.name("secret")
    body = {"metadata": {"name": name, "labels": {"only": name}}, "stringData": {"key": "value"}}
    secret = world.cluster.create(SECRETS, body, manager="test")
    told = world.cluster.get(SECRETS, name, is_metadata_only=True)
    assert (told["kind"], told["metadata"]) == ("PartialObjectMetadata", secret["metadata"])
    assert "data" not in told
    listing = world.cluster.list(SECRETS, labels=f"only={name}", is_metadata_only=True)
    assert [i["metadata"] for i in listing.items] == [secret["metadata"]]
    assert all("data" not in item for item in listing.items)
    assert int(listing.version) >= int(secret["metadata"]["resourceVersion"])
    with pytest.raises(NotFound, match='secrets "absent" not found'):
        world.cluster.get(SECRETS, "absent", is_metadata_only=True)


def test_everybody_may_ask_who_he_is_and_what_he_may(world: World) -> None:
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    status, told = world.raw("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body)
    assert status == 201
    assert told["status"]["userInfo"]["username"]
    asked = {"resourceAttributes": {"verb": "list", "resource": "pods", "namespace": world.namespace}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": asked}
    status, told = world.raw("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    assert (status, told["status"]["allowed"]) == (201, True)


def test_groups_tell_their_resources_and_absent_ones_are_not_found(world: World) -> None:
    status, told = world.raw("GET", "/apis/keystage.dev/v1")
    names = {r["name"] for r in told["resources"]}
    assert (status, names) == (200, {"functions", "functions/status", "functions/scale"})
    status, told = world.raw("GET", "/api/v1")
    assert {"pods", "pods/resize", "pods/log", "nodes"} <= {r["name"] for r in told["resources"]}
    assert world.raw("GET", "/apis/absent.keystage.dev/v1")[0] == 404
    assert world.raw("GET", "/apis/absent.keystage.dev/v1/pods")[0] == 404
    status, told = world.raw("GET", "/version")
    assert told["gitVersion"].startswith("v1.")


def test_a_put_makes_a_lease_but_no_function(world: World) -> None:
    name = world.name("lease")
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
    status, made = world.raw("PUT", world.path(LEASES, name), body)
    assert (status, made["metadata"]["name"]) == (201, name)
    assert world.raw("PUT", world.path(FUNCTIONS, "absent"), world.function("absent"))[0] == 404
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "absent"}}
    assert world.raw("PUT", world.path(SECRETS, "absent"), secret)[0] == 404


# --- merge patches and their conditions


def test_merge_patch_removes_with_null_and_replaces_lists(world: World) -> None:
    item = world.made(envVars={"A": "1", "B": "2"}, secrets=["x", "y"])
    patch = {"spec": {"envVars": {"A": None, "C": "3"}, "secrets": ["z"]}}
    item = world.cluster.patch(FUNCTIONS, name_of(item), patch, manager="test")
    assert item["spec"]["envVars"] == {"B": "2", "C": "3"}
    assert item["spec"]["secrets"] == ["z"]


@pytest.mark.parametrize("kind", [FUNCTIONS, PODS], ids=["functions", "pods"])
def test_version_and_uid_in_a_patch_are_conditions(world: World, kind: Kind) -> None:
    item = world.made() if kind is FUNCTIONS else world.made_pod()
    name, meta = name_of(item), item["metadata"]
    held = {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}
    patch = {"metadata": {**held, "labels": {"a": "1"}}}
    assert world.cluster.patch(kind, name, patch, manager="test")["metadata"]["labels"] == {"a": "1"}
    patch["metadata"]["labels"] = {"a": "2"}
    with pytest.raises(Conflict, match="the object has been modified"):
        world.cluster.patch(kind, name, patch, manager="test")
    other = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"a": "3"}}}
    with pytest.raises(Conflict, match=r"metadata.uid: Invalid value: .*: field is immutable"):
        world.cluster.patch(kind, name, other, manager="test")  # the server's status is 422
    assert world.cluster.get(kind, name)["metadata"]["labels"] == {"a": "1"}


def test_a_strategic_patch_is_not_for_custom_resources(world: World) -> None:
    name = name_of(world.made())
    content = "application/strategic-merge-patch+json"
    status, body = world.raw("PATCH", world.path(FUNCTIONS, name), {"spec": {}}, content=content)
    assert (status, body["reason"]) == (415, "UnsupportedMediaType")


def test_a_strategic_patch_finds_containers_by_name(world: World) -> None:
    containers = [{"name": n, "image": "none.invalid/x:1"} for n in ("a", "b")]
    pod = world.made_pod(containers=containers)
    patch = {"spec": {"containers": [{"name": "b", "image": "none.invalid/x:2"}]}}
    pod = world.cluster.patch_strategic(PODS, name_of(pod), patch, manager="test")
    images = {c["name"]: c["image"] for c in pod["spec"]["containers"]}
    assert images == {"a": "none.invalid/x:1", "b": "none.invalid/x:2"}


# --- schema of the custom resource


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        ({"image": ""}, "spec.image", "FieldValueInvalid"),
        ({"image": None}, "spec.image", "FieldValueRequired"),
        ({"replicas": -1}, "spec.replicas", "FieldValueInvalid"),
        ({"replicas": "2"}, "spec.replicas", "FieldValueTypeInvalid"),
        ({"replicas": 1.5}, "spec.replicas", "FieldValueTypeInvalid"),
        ({"envVars": {"A": 1}}, "spec.envVars.A", "FieldValueTypeInvalid"),
        ({"secrets": "x"}, "spec.secrets", "FieldValueTypeInvalid"),
        ({"secrets": [""]}, "spec.secrets[0]", "FieldValueInvalid"),
        ({"readOnlyRootFilesystem": "yes"}, "spec.readOnlyRootFilesystem", "FieldValueTypeInvalid"),
    ],
)
def test_a_function_that_breaks_the_schema_is_refused(
    world: World, spec: Object, field: str, reason: str
) -> None:
    status, body = world.raw("POST", world.path(FUNCTIONS), world.function(**spec))
    assert (status, body["reason"]) == (422, "Invalid")
    assert (field, reason) in {(c["field"], c["reason"]) for c in body["details"]["causes"]}
    assert body["details"]["kind"] == "Function"


@pytest.mark.parametrize("name", ["3d", "a" * 64, "a.b"])
def test_a_function_is_named_as_its_service_can_be(world: World, name: str) -> None:
    status, body = world.raw("POST", world.path(FUNCTIONS), world.function(name))
    assert status == 422
    assert {c["field"] for c in body["details"]["causes"]} == {"metadata.name"}


def test_unknown_fields_are_dropped_and_nothing_is_filled_in(world: World) -> None:
    body = world.function(limits={"cpu": "1000m"}, unknown=1)
    body["unknown"] = {"a": 1}
    body["status"] = {"desired": 4}
    item = world.cluster.create(FUNCTIONS, body, manager="test")
    assert item["spec"] == {"image": "image:1", "limits": {"cpu": "1000m"}}
    assert "unknown" not in item
    assert "status" not in item


# --- built-in kinds: what is refused and what is filled in


def test_a_wrong_type_in_a_built_in_kind_is_a_bad_request(world: World) -> None:
    body = world.pod(terminationGracePeriodSeconds="long")
    status, answer = world.raw("POST", world.path(PODS), body)
    assert (status, answer["reason"]) == (400, "BadRequest")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"containers": []}, "spec.containers"),
        ({"containers": [{"name": "A", "image": "x"}]}, "spec.containers[0].name"),
        (
            {"containers": [{"name": "a", "image": "x", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
            "spec.containers[0].volumeMounts[0].name",
        ),
        (
            {
                "containers": [
                    {
                        "name": "a",
                        "image": "x",
                        "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}},
                    }
                ]
            },
            "spec.containers[0].resources.requests",
        ),
    ],
)
def test_a_pod_that_cannot_be_is_refused(world: World, changes: Object, field: str) -> None:
    status, body = world.raw("POST", world.path(PODS), world.pod(**changes))
    assert (status, body["reason"]) == (422, "Invalid")
    assert field in {c["field"] for c in body["details"]["causes"]}


def test_labels_that_cannot_be_are_refused(world: World) -> None:
    for labels in ({"a": "x" * 64}, {"a": "b c"}, {"a b": "c"}):
        body = world.pod()
        body["metadata"]["labels"] = labels
        status, answer = world.raw("POST", world.path(PODS), body)
        assert status == 422
        assert {c["field"] for c in answer["details"]["causes"]} == {"metadata.labels"}


def test_secrets_hold_base64_and_services_get_an_address(world: World) -> None:
    body = {"metadata": {"name": world.name("secret")}, "stringData": {"key": "value"}}
    secret = world.cluster.create(SECRETS, body, manager="test")
    assert (secret["type"], secret["data"]) == ("Opaque", {"key": "dmFsdWU="})
    assert "stringData" not in secret
    ports = [{"name": "http", "port": 8080}, {"name": "wire", "port": 7800}]
    name = world.name("service")
    given = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": ports}}
    service = world.cluster.apply(SERVICES, name, given, manager="test")
    assert service["spec"]["clusterIP"]
    assert service["spec"]["ports"][0] == {
        "name": "http",
        "port": 8080,
        "protocol": "TCP",
        "targetPort": 8080,
    }
    again = world.cluster.apply(SERVICES, name, given, manager="test")
    assert again["metadata"]["resourceVersion"] == service["metadata"]["resourceVersion"]


def test_quantities_come_back_in_one_form(world: World) -> None:
    given = {"cpu": "1500m", "memory": "1024Mi"}
    resources = {"limits": given, "requests": {"cpu": "0.5"}}
    pod = world.made_pod(containers=[{"name": "a", "image": "x", "resources": resources}])
    told = pod["spec"]["containers"][0]["resources"]
    assert told == {
        "limits": {"cpu": "1500m", "memory": "1Gi"},
        "requests": {"cpu": "500m", "memory": "1Gi"},
    }
    assert pod["status"]["qosClass"] == "Burstable"

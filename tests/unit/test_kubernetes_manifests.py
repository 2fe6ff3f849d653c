"""What the controller makes: valid by Kubernetes' schemas, without rights, hashed by what matters."""

from __future__ import annotations

import dataclasses
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from keystage.kubernetes import manifests_workload as workload
from keystage.kubernetes.api import (
    CORES_ANNOTATION,
    FUNCTION_LABEL,
    POOL_LABEL,
    ROLE_LABEL,
    STAGE_LABEL,
    TEMPLATE_LABEL,
)
from keystage.kubernetes.manifests import (
    Bundles,
    Owner,
    Settings,
    gpu_gib_of,
    router_address,
    shape_hash,
    template_hash,
)
from keystage.kubernetes.manifests_pod import Place, gpu_of_pod, parked_pod, stage_pod
from keystage.local.api import Deployment

VERSION = "1.34"
SETTINGS = Settings(
    namespace="keystage", function_namespace="keystage-fn", bundles=Bundles(host_path="/srv/bundles")
)
OWNER = Owner("llm-stage-2", "7b1f6f3e-0000-4000-8000-000000000001")


def stage(index: int = 2, **changes: Any) -> Deployment:
    env = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "llm",
        "KEYSTAGE_BUNDLE": "file:///bundles/llm",
        "KEYSTAGE_STAGES": str(index),
        "KEYSTAGE_THREADS": "1",
        **changes.pop("env", {}),
    }
    labels = {"keystage.pipeline": "llm", "keystage.role": "stage", "keystage.stage": str(index)}
    return Deployment(
        service=f"llm-stage-{index}",
        image="keystage.local/stage:1",
        envVars=env,
        labels={**labels, **changes.pop("labels", {})},
        **changes,
    )


def router(**changes: Any) -> Deployment:
    env = {"KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": "llm", "KEYSTAGE_BUNDLE": "file:///bundles/llm"}
    return Deployment(service="llm", image="keystage.local/router:1", envVars=env, **changes)


def plain(**changes: Any) -> Deployment:
    return Deployment(service="echo", image="functions/echo:1", envProcess="cat", **changes)


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    entries = pod["spec"]["containers"][0]["env"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def made(deployment: Deployment, **more: Any) -> dict[str, Any]:
    template = template_hash(deployment, more.get("settings", SETTINGS))
    settings = more.pop("settings", SETTINGS)
    return stage_pod(deployment, settings, OWNER, name="llm-stage-2-abcde", template=template, **more)


EVERYTHING = stage(
    constraints=["zone=a", "node.kubernetes.io/instance-type == big"],
    secrets=["token", "other"],
    limits={"memory": "2Gi", "cpu": "2"},
    requests={"memory": "1Gi", "cpu": "1"},
    annotations={"com.openfaas.health.http.path": "/healthz"},
    labels={"com.openfaas.scale.min": "2", "team": "a"},
    env={"KEYSTAGE_DEVICE": "cuda", "KEYSTAGE_NODE": "mine"},
)
WITH_ALL = Settings(
    namespace="keystage",
    function_namespace="keystage-fn",
    bundles=Bundles(claim="bundles"),
    image_pull_policy="IfNotPresent",
    image_pull_secrets=("registry",),
    wire_plain=True,
    cluster_domain="cluster.local",
)
WITHOUT = Settings(
    namespace="keystage", function_namespace="keystage-fn", has_keysmanager=False, requests=(), user=0
)


def test_every_hosted_stage_counts_with_kv_state_of_its_own() -> None:
    def gib(**env: str) -> int:
        return gpu_gib_of(stage(env={"KEYSTAGE_DEVICE": "cuda", **env}), 1 << 30)

    assert gib(KEYSTAGE_STAGES="1") == 3  # 1 GiB of parameters, 1.5 of runtime, 0.5 of KV state
    assert gib(KEYSTAGE_STAGES="0-7") == 7
    assert gib(KEYSTAGE_STAGES="0-7", KEYSTAGE_KV_BYTES=str(3 << 30)) == 6
    assert gib(KEYSTAGE_STAGES="0-2000") == gib(KEYSTAGE_STAGES="0-1023")
    assert gib(KEYSTAGE_STAGES="0-99999999999") == gib(KEYSTAGE_STAGES="9-1") == gib(KEYSTAGE_STAGES="x") == 3


@pytest.mark.parametrize("settings", [SETTINGS, WITH_ALL, WITHOUT], ids=["default", "all", "without"])
@pytest.mark.parametrize(
    "place",
    [Place(), Place("node1", 3), Place("node1", 3, is_required=False)],
    ids=["any", "required", "preferred"],
)
@pytest.mark.parametrize("deployment", [stage(), EVERYTHING], ids=["bare", "everything"])
def test_stage_and_parked_pods_are_valid(settings: Settings, place: Place, deployment: Deployment) -> None:
    gib = gpu_gib_of(deployment, 1 << 30)
    pod = made(deployment, settings=settings, place=place, gpu_gib=gib, cores=1.5)
    kubernetes_validate.validate(pod, VERSION, strict=True)
    parked = parked_pod(
        deployment, settings, OWNER, name="llm-parked-abcde", shape="0123456789", place=place, gpu_gib=gib
    )
    kubernetes_validate.validate(parked, VERSION, strict=True)


@pytest.mark.parametrize("settings", [SETTINGS, WITH_ALL, WITHOUT], ids=["default", "all", "without"])
@pytest.mark.parametrize(
    "deployment",
    [
        router(),
        plain(),
        plain(
            secrets=["a"],
            annotations={"com.openfaas.ready.http.path": "/r", "com.openfaas.health.http.path": "/h"},
        ),
    ],
    ids=["router", "plain", "probed"],
)
def test_workloads_are_valid(settings: Settings, deployment: Deployment) -> None:
    template = template_hash(deployment, settings)
    for body in (
        workload.deployment(deployment, settings, OWNER, template=template, replicas=3),
        workload.service(deployment, settings, OWNER, template=template),
        workload.disruption_budget("llm-stage-2", settings, OWNER, replicas=2),
    ):
        kubernetes_validate.validate(body, VERSION, strict=True)


def test_a_stage_pod_says_what_the_worker_needs_and_may_nothing() -> None:
    pod = made(stage())
    env = env_of(pod)
    assert env["KEYSTAGE_ROUTER"] == "tcp://llm.keystage-fn.svc:7800"
    assert env["KEYSTAGE_NODE"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert env["KEYSTAGE_REPLICA"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert env["KEYSTAGE_KEYSMANAGER_PODS"] == "/var/run/keystage/node/pods.sock"
    assert env["OMP_NUM_THREADS"] == "1"
    spec = pod["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 65
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    container = spec["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    assert all(mounts[name]["readOnly"] for name in ("node", "wire", "bundles"))
    assert pod["metadata"]["ownerReferences"][0] == {
        "apiVersion": "keystage.dev/v1",
        "kind": "Function",
        "name": OWNER.name,
        "uid": OWNER.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    labels = pod["metadata"]["labels"]
    assert labels[FUNCTION_LABEL] == labels["faas_function"] == "llm-stage-2"
    assert (labels[STAGE_LABEL], labels[ROLE_LABEL]) == ("2", "stage")


def test_without_a_keysmanager_nothing_of_the_node_is_mounted_but_bundles() -> None:
    pod = made(stage(), settings=WITHOUT)
    assert not [v for v in pod["spec"]["volumes"] if "hostPath" in v]
    assert "KEYSTAGE_KEYSMANAGER_PODS" not in env_of(pod)


def test_a_parked_pod_is_no_functions_and_no_stages() -> None:
    pod = parked_pod(stage(), SETTINGS, OWNER, name="llm-parked-x", shape="cafe")
    assert FUNCTION_LABEL not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"][POOL_LABEL] == "cafe"
    env = env_of(pod)
    assert env["KEYSTAGE_PARKED"] == "1"
    assert not {"KEYSTAGE_STAGES", "OPENFAAS_NAME"} & env.keys()


def test_a_pods_own_word_overrules_the_deployments() -> None:
    assert env_of(made(EVERYTHING, gpu_gib=2))["KEYSTAGE_NODE"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


def test_a_gpu_is_asked_for_by_index_and_seen_as_the_only_one() -> None:
    gib = gpu_gib_of(stage(env={"KEYSTAGE_DEVICE": "cuda:1"}), 5 << 30)
    assert gib == 7  # 5 of parameters, 0.5 of KV, 1.5 to run
    pod = made(stage(env={"KEYSTAGE_DEVICE": "cuda:1"}), place=Place("node1", 3), gpu_gib=gib)
    assert gpu_of_pod(pod) == (3, 7)
    assert env_of(pod)["KEYSTAGE_DEVICE"] == "cuda:0"
    assert (
        gpu_gib_of(stage(env={"KEYSTAGE_DEVICE": "cuda"}, labels={"keystage.gpu_gib": "20"}), 5 << 30) == 20
    )
    assert gpu_gib_of(stage(), 5 << 30) == gpu_gib_of(router(), 1) == 0


def test_cores_of_the_policy_are_asked_for_and_told() -> None:
    pod = made(stage(limits={"cpu": "1", "memory": "1Gi"}, requests={"cpu": "1", "memory": "1Gi"}), cores=2.5)
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"]["cpu"] == resources["requests"]["cpu"] == "2500m"
    assert env_of(pod)["KEYSTAGE_THREADS"] == "3"
    assert pod["metadata"]["annotations"][CORES_ANNOTATION] == "2.5"


def test_constraints_are_a_node_selector_and_sites_an_affinity_by_name() -> None:
    pod = made(EVERYTHING, place=Place("node9"))
    assert pod["spec"]["nodeSelector"] == {"zone": "a", "node.kubernetes.io/instance-type": "big"}
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    fields = affinity["nodeSelectorTerms"][0]["matchFields"]
    assert fields == [{"key": "metadata.name", "operator": "In", "values": ["node9"]}]


def test_a_router_is_one_pod_that_is_stopped_first() -> None:
    body = workload.deployment(router(), SETTINGS, Owner("llm", "u"), template="t", replicas=4)
    assert (body["spec"]["replicas"], body["spec"]["strategy"]) == (1, {"type": "Recreate"})
    env = env_of(body["spec"]["template"])
    assert env["KEYSTAGE_ROUTER"] == router_address(stage(), SETTINGS)
    assert env["KEYSTAGE_WIRE_BIND"] == "0.0.0.0"
    ports = workload.service(router(), SETTINGS, Owner("llm", "u"), template="t")["spec"]["ports"]
    assert [(p["name"], p["port"]) for p in ports] == [("http", 8080), ("wire", 7800)]


def test_a_plain_function_rolls_over_and_lets_gateways_see_that_it_leaves() -> None:
    body = workload.deployment(plain(), SETTINGS, Owner("echo", "u"), template="t", replicas=4)
    assert body["spec"]["replicas"] == 4
    assert body["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    container = body["spec"]["template"]["spec"]["containers"][0]
    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 3}}}
    assert container["readinessProbe"]["tcpSocket"] == {"port": 8080}
    assert "livenessProbe" not in container
    env = env_of(body["spec"]["template"])
    assert (env["fprocess"], env["PORT"], env["exec_timeout"]) == ("cat", "8080", "10m0s")
    assert body["metadata"]["labels"][TEMPLATE_LABEL] == "t"


def test_template_hashes_tell_what_restarts_pods() -> None:
    base = template_hash(stage(), SETTINGS)
    assert template_hash(stage(labels={"com.openfaas.scale.max": "9"}), SETTINGS) == base
    assert template_hash(stage(annotations={"note": "x"}), SETTINGS) == base
    assert template_hash(stage(), dataclasses.replace(SETTINGS, parked_per_pipeline=9)) == base
    others = [
        template_hash(stage(3), SETTINGS),
        template_hash(stage(env={"KEYSTAGE_SLOTS": "3"}), SETTINGS),
        template_hash(msgspec.structs.replace(stage(), image="b"), SETTINGS),
        template_hash(stage(limits={"cpu": "1"}), SETTINGS),
        template_hash(stage(labels={"team": "b"}), SETTINGS),
        template_hash(stage(), dataclasses.replace(SETTINGS, wire_plain=True)),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_shapes_are_shared_by_stages_that_differ_in_the_stage_alone() -> None:
    base = shape_hash(stage(2), SETTINGS)
    assert shape_hash(stage(3), SETTINGS) == base
    assert shape_hash(stage(3, env={"KEYSTAGE_THREADS": "2"}), SETTINGS) != base
    assert shape_hash(stage(3, limits={"cpu": "2"}), SETTINGS) != base
    assert shape_hash(stage(2), SETTINGS, 4) != base


def test_the_runtime_of_gpus_is_for_stages_on_one() -> None:
    settings = dataclasses.replace(SETTINGS, gpu_runtime_class="nvidia")
    on_gpu = made(
        stage(env={"KEYSTAGE_DEVICE": "cuda"}), settings=settings, place=Place("node1", 0), gpu_gib=7
    )
    assert on_gpu["spec"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in made(stage(), settings=settings)["spec"]

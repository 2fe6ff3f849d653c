"""What the controller makes is taken by a Kubernetes API server as it is: nothing is lost, nothing drifts.

One suite over the fake and over the real one (`KUBECONFIG=... pytest -m e2e tests/contract`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.kube.answers import Object
from support.kube.contract_world import World, name_of, world

from keystage.kubernetes import manifests_workload
from keystage.kubernetes.client import (
    DEPLOYMENTS,
    FUNCTIONS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Kind,
)
from keystage.kubernetes.manifests import Bundles, Owner, Settings, template_hash
from keystage.kubernetes.manifests_pod import Place, parked_pod, stage_pod
from keystage.local.api import Deployment

__all__ = ["world"]
PIPELINE = {"KEYSTAGE_PIPELINE": "llm", "KEYSTAGE_BUNDLE": "file:///bundles/llm"}
STAGE = Deployment(
    service="stage",
    image="none.invalid/stage:1",
    envVars={**PIPELINE, "KEYSTAGE_ROLE": "stage", "KEYSTAGE_STAGES": "0"},
    limits={"cpu": "2", "memory": "2Gi"},
    requests={"cpu": "500m", "memory": "1Gi"},
    secrets=["one", "two"],
    constraints=["disk=ssd"],
)
ROUTER = Deployment(
    service="router", image="none.invalid/router:1", envVars={**PIPELINE, "KEYSTAGE_ROLE": "router"}
)
PLAIN = Deployment(
    service="plain",
    image="none.invalid/plain",
    envProcess="cat",
    labels={"com.openfaas.scale.zero": "true"},
    annotations={"com.openfaas.health.http.path": "/healthy"},
    readOnlyRootFilesystem=True,
)
BUNDLES = {"host": Bundles(host_path="/data"), "claim": Bundles(claim="bundles"), "home": Bundles()}


def settings(world: World, bundles: str = "host", *, has_keysmanager: bool = True) -> Settings:
    return Settings(
        namespace=world.namespace,
        function_namespace=world.namespace,
        has_keysmanager=has_keysmanager,
        bundles=BUNDLES[bundles],
    )


def owner(world: World) -> Owner:
    function = world.made()
    return Owner(name_of(function), function["metadata"]["uid"])


def missing(sent: Any, told: Any, path: str = "") -> list[str]:
    """Fields that were sent and did not come back as they were; lists are told in the same order."""
    if isinstance(sent, dict) and isinstance(told, dict):
        return [text for k, v in sent.items() for text in missing(v, told.get(k), f"{path}.{k}")]
    if isinstance(sent, list) and isinstance(told, list) and len(sent) == len(told):
        pairs = enumerate(zip(sent, told, strict=True))
        return [text for n, (a, b) in pairs for text in missing(a, b, f"{path}[{n}]")]
    is_empty = told is None and sent in ("", {}, [])
    return [] if sent == told or is_empty else [f"{path}: {json.dumps(sent)} came back as {json.dumps(told)}"]


def created(world: World, body: Object) -> None:
    body["spec"]["schedulerName"] = "nobody"
    told = world.cluster.create(PODS, body, manager="keystage-controller")
    tolerations = told["spec"].pop("tolerations", [])  # the server adds its own
    wanted = body["spec"].pop("tolerations", [])
    assert missing(body, told) == []
    assert all(toleration in tolerations for toleration in wanted)


@pytest.mark.parametrize("bundles", BUNDLES)
@pytest.mark.parametrize("has_keysmanager", [True, False])
@pytest.mark.parametrize("place", ["anywhere", "gpu", "preferred"])
def test_pods_of_stages(world: World, bundles: str, has_keysmanager: bool, place: str) -> None:
    made = settings(world, bundles, has_keysmanager=has_keysmanager)
    places = {
        "anywhere": Place(),
        "gpu": Place(world.node, 0),
        "preferred": Place(world.node, is_required=False),
    }
    created(
        world,
        stage_pod(
            STAGE,
            made,
            owner(world),
            name=world.name("stage"),
            template=template_hash(STAGE, made),
            place=places[place],
            gpu_gib=8 if place == "gpu" else 0,
            cores=1.5,
        ),
    )


def test_parked_pods(world: World) -> None:
    body = parked_pod(
        STAGE,
        settings(world),
        owner(world),
        name=world.name("parked"),
        shape="abc",
        place=Place(world.node),
        gpu_gib=0,
    )
    created(world, body)


def applied(world: World, kind: Kind, body: Object) -> Object:
    """Applies twice: the second time nothing changes."""
    name = name_of(body)
    first = world.cluster.apply(kind, name, body, manager="keystage-controller")
    assert missing(body, first) == []
    again = world.cluster.apply(kind, name, body, manager="keystage-controller")
    assert again["metadata"].get("generation") == first["metadata"].get("generation")
    assert again["spec"] == first["spec"]
    return first


@pytest.mark.parametrize("function", [ROUTER, PLAIN], ids=["router", "function"])
@pytest.mark.parametrize("bundles", BUNDLES)
def test_workloads_and_services_and_their_redeployment(
    world: World, function: Deployment, bundles: str
) -> None:
    mine = owner(world)
    for made in (settings(world, bundles), settings(world, "claim")):
        template = template_hash(function, made)
        applied(
            world,
            DEPLOYMENTS,
            manifests_workload.deployment(function, made, mine, template=template, replicas=0),
        )
        applied(world, SERVICES, manifests_workload.service(function, made, mine, template=template))
    world.cluster.delete(FUNCTIONS, mine.name)
    for kind in (DEPLOYMENTS, SERVICES):
        world.until(lambda kind=kind: world.is_gone(kind, function.service), timeout_s=60)  # type: ignore[misc]


def test_disruption_budgets(world: World) -> None:
    mine = owner(world)
    for replicas in (2, 3):
        body = manifests_workload.disruption_budget("budget", settings(world), mine, replicas=replicas)
        applied(world, POD_DISRUPTION_BUDGETS, body)

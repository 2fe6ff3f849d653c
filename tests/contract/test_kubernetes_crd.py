"""The custom resource, the types that Keystage reads it with, and the chart: one and the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.helm import named, render
from support.kube.cluster import Kube, crd
from support.kube.fixtures import kube as kube

from keystage.kubernetes.api import (
    CONTROLLER_MANAGER,
    GATEWAY_MANAGER,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    FunctionSpec,
    FunctionStatus,
    deployment_of,
    spec_of,
)
from keystage.kubernetes.client import FUNCTIONS, Object

FULL = FunctionSpec(
    image="image:1",
    envProcess="cat",
    envVars={"A": "", "KEYSTAGE_ROLE": "stage"},
    constraints=["disk=ssd"],
    secrets=["one"],
    labels={"com.openfaas.scale.min": "1"},
    annotations={"any": "text"},
    limits={"cpu": "2", "memory": "1Gi"},
    requests={"cpu": "1"},
    readOnlyRootFilesystem=True,
    replicas=0,
)
STATUS = FunctionStatus(
    desired=2,
    replicas=2,
    ready=1,
    cores=1.5,
    selector="a=b",
    template="abc",
    trouble=["one", "two"],
    observedGeneration=3,
)


def body(spec: FunctionSpec, status: FunctionStatus | None = None) -> Object:
    made: Object = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "f"}}
    made["spec"] = msgspec.to_builtins(spec)
    if status is not None:
        made["status"] = msgspec.to_builtins(status)
    return made


def schema() -> Any:
    return crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


def test_the_chart_renders_what_the_fake_serves() -> None:
    assert named(render(), "CustomResourceDefinition", f"{PLURAL}.{GROUP}")["spec"] == crd()["spec"]


@pytest.mark.parametrize(
    ("part", "struct"), [("spec", FunctionSpec), ("status", FunctionStatus)], ids=["spec", "status"]
)
def test_its_fields_are_those_of_the_type(part: str, struct: type[msgspec.Struct]) -> None:
    assert set(schema()[part]["properties"]) == set(struct.__struct_fields__)


def test_names_are_those_that_the_code_uses() -> None:
    spec = crd()["spec"]
    assert (spec["group"], spec["names"]["plural"], spec["names"]["kind"]) == (GROUP, PLURAL, KIND)
    assert spec["versions"][0]["name"] == VERSION
    paths = spec["versions"][0]["subresources"]["scale"]
    assert paths == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_columns_show_fields_that_there_are() -> None:
    for column in crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        top, field, *_ = column["jsonPath"].lstrip(".").split(".")
        if top != "metadata":
            assert field.partition("[")[0] in schema()[top]["properties"], column["name"]


def test_a_function_comes_back_as_it_was_sent(kube: Kube) -> None:
    cluster = kube.cluster()
    made = cluster.apply(FUNCTIONS, "f", body(FULL), manager=GATEWAY_MANAGER)
    assert msgspec.convert(made["spec"], FunctionSpec) == FULL
    told = cluster.apply(FUNCTIONS, "f", body(FULL, STATUS), manager=CONTROLLER_MANAGER, subresource="status")
    assert msgspec.convert(told["status"], FunctionStatus) == STATUS
    assert told["metadata"]["generation"] == 1
    deployment = deployment_of("f", cluster.namespace, FULL)
    assert msgspec.structs.replace(spec_of(deployment), replicas=FULL.replicas) == FULL


def test_the_least_function_has_an_image_and_nothing_else(kube: Kube) -> None:
    made = kube.cluster().apply(FUNCTIONS, "f", body(FunctionSpec(image="i")), manager=GATEWAY_MANAGER)
    assert made["spec"] == {"image": "i"}
    assert msgspec.convert(made["spec"], FunctionSpec) == FunctionSpec(image="i")


def test_a_definition_is_replaced_by_a_newer_one(kube: Kube) -> None:
    newer = crd()
    fields = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["added"] = {"type": "integer", "default": 7}
    kube.cluster().create(FUNCTIONS, body(FunctionSpec(image="i")), manager="test")
    kube.patch("customresourcedefinitions", f"{PLURAL}.{GROUP}", {"spec": newer["spec"]})
    made = kube.cluster().patch(FUNCTIONS, "f", {"spec": {"envProcess": "x"}}, manager="test")
    assert made["spec"] == {"image": "i", "envProcess": "x", "added": 7}

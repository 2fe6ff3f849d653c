"""What a deployment must keep to in order to become pods: refused by name, with bound and value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keystage.kubernetes.checks import check, check_load, check_replicas
from keystage.local.api import Deployment, Load

STAGE = {"KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "file:///b", "KEYSTAGE_STAGES": "0-1"}


def deployment(**fields: Any) -> Deployment:
    return Deployment(**{"service": "f", "image": "ghcr.io/x/y:1", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"labels": {"a": "", "app.example.org/b": "c_d.e-f"}},
        {"labels": {"com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "15m"}},
        {"labels": {"com.openfaas.scale.zero": "true", "faas_function": "f"}},
        {"annotations": {"topic": "any text, of any kind/length"}},
        {"constraints": ["kubernetes.io/arch=amd64", "disk == ssd", "empty="]},
        {"limits": {"cpu": "1.5", "memory": "128Mi"}, "requests": {"cpu": "100m", "memory": "1e8"}},
        {"limits": {"cpu": "", "memory": ""}},
        {"envVars": {"KEYSTAGE_ROLE": "stage", **STAGE}},
        {"service": "p", "envVars": {"KEYSTAGE_ROLE": "router", **STAGE}},
        {"image": "localhost:5000/a@sha256:" + "0" * 64},
    ],
)
def test_what_can_run_is_taken(fields: dict[str, Any]) -> None:
    check(deployment(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"service": "1a"}, "'1a' must begin with a letter"),
        ({"service": "A"}, "function name 'A' must have at most 63 characters"),
        ({"image": ""}, "image is empty; Kubernetes runs images only"),
        ({"image": "a b"}, "image must be a reference of at most 1024 characters, not 'a b'"),
        ({"image": "x" * 1025}, "at most 1024"),
        ({"labels": {"a b": ""}}, "label 'a b' must be a name"),
        ({"labels": {"UPPER.org/": ""}}, "label 'UPPER.org/' must be a name"),
        ({"labels": {"Upper.org/x": ""}}, "a DNS subdomain"),
        ({"labels": {"a": "b c"}}, "label a must have at most 63 .* not 'b c'"),
        ({"labels": {"a": "x" * 64}}, "label a must have at most 63"),
        ({"labels": {"keystage.dev/function": "other"}}, "names under keystage.dev/ are not taken"),
        ({"annotations": {"keystage.dev/wake": "1"}}, "names under keystage.dev/ are not taken"),
        ({"annotations": {"a": "x" * (256 << 10)}}, "annotations must have at most 262144 bytes, not 262145"),
        ({"constraints": ["a!=b"]}, "constraint 'a!=b' must be a label of nodes: label=value"),
        ({"constraints": ["ssd"]}, "constraint 'ssd' must be"),
        ({"constraints": ["a=b c"]}, "constraint 'a=b c' must be"),
        ({"limits": {"nvidia.com/gpu": "1"}}, "limits must be of cpu or memory, not of 'nvidia.com/gpu'"),
        ({"limits": {"cpu": "much"}}, "limits.cpu must be a quantity above 0 .* not 'much'"),
        ({"requests": {"memory": "-1"}}, "requests.memory must be a quantity above 0 .* not '-1'"),
        ({"requests": {"memory": "0"}}, "requests.memory must be a quantity above 0 .* not '0'"),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "500m"}}, "requests.cpu must be at most limits.cpu"),
        ({"envVars": {"a-b": "1"}}, "'a-b' is no name of an environment variable"),
        ({"envVars": {"KEYSTAGE_ROLE": "stage"}}, "role stage and needs KEYSTAGE_PIPELINE"),
        ({"envVars": {"KEYSTAGE_ROLE": "router", **STAGE}}, "a router must be named as its pipeline, 'p'"),
        ({"envVars": {"KEYSTAGE_DRAIN_S": "soon"}}, "KEYSTAGE_DRAIN_S must be seconds, not 'soon'"),
        ({"envVars": {"A": "x" * (1 << 20)}}, "a deployment must have at most 1048576 bytes, not 10[0-9]+"),
        ({"labels": {"com.openfaas.scale.type": "cpu"}}, "label com.openfaas.scale.type must be"),
    ],
)
def test_what_cannot_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check(deployment(**fields))
    name = fields.get("service", "f")
    assert str(caught.value).startswith((f"function {name}", f"function name '{name}'"))


def test_numbers_are_bounded() -> None:
    check_replicas("f", 0)
    with pytest.raises(ValueError, match=r"function f: replicas must be in 0\.\.[0-9]+, not -1"):
        check_replicas("f", -1)
    load = Load("g", 1, 2, replicas={"f-0": 1})
    check_load("f", load)
    with pytest.raises(ValueError, match=r"replicas\[f-0\] must be at least 0, not -1"):
        check_load("f", msgspec.structs.replace(load, replicas={"f-0": -1}))
    with pytest.raises(ValueError, match=r"gateway must have 1\.\.128 characters, not 0"):
        check_load("f", msgspec.structs.replace(load, gateway=""))

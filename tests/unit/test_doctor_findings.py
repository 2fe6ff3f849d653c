"""What `keystage doctor` makes of what it was told: clusters, functions, exit codes."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

import pytest

from keystage.cli import doctor_cluster, doctor_gateway, doctor_openfaas, doctor_versions
from keystage.cli.doctor_kubernetes import Seen
from keystage.cli.doctor_report import Check, exit_code, text
from keystage.cli.doctor_rights import CONTROLLER, GATEWAY, INSTALLER, rights_of
from keystage.openfaas.provider import limits
from keystage.openfaas.types import FunctionStatus

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)
READY = [{"type": "Ready", "status": "True"}]


def _node(name: str, kernel: str = "6.1.0-13-amd64", **allocatable: str) -> dict[str, Any]:
    units = {key.replace("_", "/"): value for key, value in allocatable.items()}
    return {
        "metadata": {"name": name},
        "status": {
            "conditions": READY,
            "allocatable": {"cpu": "4", **units},
            "nodeInfo": {"kernelVersion": kernel},
        },
    }


def _pod(component: str, node: str, **env: str) -> dict[str, Any]:
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return {
        "metadata": {
            "name": f"{component}-{node}",
            "labels": {"app.kubernetes.io/component": component},
        },
        "spec": {"nodeName": node, "containers": [{"name": component, "env": variables}]},
        "status": {"conditions": READY},
    }


def _function(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "generation": 2}, "status": {"observedGeneration": 2, **status}}


WHOLE = Seen(
    namespace="ks",
    function_namespace="ks-fn",
    version="v1.36.2",
    core=frozenset({"pods", "pods/resize"}),
    ours=frozenset({"functions", "functions/status", "functions/scale"}),
    has_metrics=True,
    user="admin",
    taken_for="a person who installs",
    missing=(),
    nodes=[_node("a"), _node("b", **{"keystage.dev_gpu0": "80"})],
    system=[
        _pod("gateway", "a", KEYSTAGE_TIMEOUT_S="300"),
        _pod("controller", "a"),
        _pod("keysmanager", "a"),
        _pod("keysmanager", "b"),
    ],
    functions=[_function("llm", ready=1, desired=1)],
    lease={"spec": {"holderIdentity": "controller-a", "renewTime": "2026-03-01T11:59:55.000000Z"}},
    labels={},
    ingresses=[],
    hidden=(),
)


def _bad(**changes: Any) -> list[Check]:
    checks = doctor_cluster.checks(dataclasses.replace(WHOLE, **changes), NOW)
    return [check for check in checks if check.level != "ok"]


def test_a_whole_cluster_is_well() -> None:
    assert _bad() == []
    assert doctor_cluster.gateway_timeout_s(WHOLE) == 300.0


@pytest.mark.parametrize(
    ("changes", "level", "thing", "words"),
    [
        ({"version": "v1.29.4"}, "fail", "version", "v1.29.4"),
        ({"ours": None, "functions": None}, "fail", "custom resource functions.keystage.dev", "absent"),
        ({"ours": frozenset({"functions"})}, "fail", "custom resource functions.keystage.dev", "functions"),
        ({"core": frozenset({"pods"})}, "warn", "in-place resize", "not served by v1.36.2"),
        ({"has_metrics": False}, "warn", "metrics.k8s.io", "absent"),
        ({"missing": ("create namespaces",)}, "warn", "rights of admin", "create namespaces"),
        ({"lease": {}}, "fail", "leading controller", "none"),
        (
            {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
            "fail",
            "pod security",
            "restricted",
        ),
        ({"hidden": ("GET /api/v1/nodes answered 403",)}, "warn", "what this account may see", "403"),
        (
            {"nodes": [_node("a"), _node("b", kernel="4.18.0-553.el8")]},
            "warn",
            "kernels",
            "b (4.18.0-553.el8)",
        ),
    ],
)
def test_each_lack_is_named(changes: dict[str, Any], level: str, thing: str, words: str) -> None:
    (found,) = _bad(**changes)
    assert found.level == level
    assert found.thing.startswith(thing)
    assert words in found.actual
    assert found.advice


def test_what_could_not_be_seen_is_not_judged() -> None:
    checks = doctor_cluster.checks(
        dataclasses.replace(
            WHOLE, missing=None, nodes=None, system=None, functions=None, lease=None, labels=None,
            ingresses=None, hidden=("a", "b"),
        ),
        NOW,
    )  # fmt: skip
    assert {check.thing for check in checks if check.level == "ok"} == {
        "version", "custom resource functions.keystage.dev", "in-place resize", "metrics.k8s.io",
    }  # fmt: skip
    assert [check.thing for check in checks if check.level != "ok"] == ["what this account may see"]


def test_a_service_account_that_lacks_a_right_fails() -> None:
    (found,) = _bad(
        user="system:serviceaccount:ks:keystage-controller",
        taken_for="controller",
        missing=("patch pods/resize in ks-fn",),
    )
    assert found.level == "fail"
    assert "patch pods/resize in ks-fn" in found.actual


def test_a_gpu_that_two_plugins_hand_out_fails() -> None:
    both = _node("b", **{"keystage.dev_gpu0": "80", "nvidia.com_gpu": "1"})
    (found,) = _bad(nodes=[_node("a"), both])
    assert found.level == "fail"
    assert found.actual == "nvidia.com/gpu too on b"


def test_a_vendor_gpu_alone_is_of_no_use_to_stages() -> None:
    (found,) = _bad(nodes=[_node("a"), _node("b", **{"nvidia.com_gpu": "2"})])
    assert (found.level, found.thing) == ("warn", "GPUs for stages")


def test_a_plugin_that_withdrew_its_units_is_no_gpu() -> None:
    assert _bad(nodes=[_node("a"), _node("b", **{"keystage.dev_gpu0": "80", "nvidia.com_gpu": "0"})]) == []


def test_unready_nodes_and_missing_keysmanagers_are_named() -> None:
    lost = _node("c")
    lost["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    found = _bad(nodes=[_node("a"), _node("b"), lost, _node("d")])
    assert [(check.thing, check.actual) for check in found] == [
        ("nodes", "3 of 4, not c"),
        ("KeysManagers", "2, none on d"),
    ]
    assert exit_code(found) == 1


def test_a_terminating_gateway_does_not_count() -> None:
    leaving = _pod("gateway", "a")
    leaving["metadata"]["deletionTimestamp"] = "2026-03-01T11:00:00Z"
    found = _bad(system=[leaving, *(WHOLE.system or ())[1:]])
    assert [(check.thing, check.actual) for check in found] == [("gateway in ks", "0 of 0")]


def test_a_lease_nobody_renews_fails() -> None:
    (found,) = _bad(lease={"spec": {"holderIdentity": "x", "renewTime": "2026-03-01T11:58:00.000000Z"}})
    assert (found.level, found.actual) == ("fail", "x, 120 s ago")


def test_troubled_and_unobserved_functions_warn() -> None:
    late = {"metadata": {"name": "late", "generation": 3}, "status": {"observedGeneration": 2}}
    found = _bad(functions=[_function("ill", trouble=["no place: 0/2 nodes"], desired=2, ready=1), late])
    assert [check.thing for check in found] == ["function ill", "function late"]
    assert "1 of 2 ready: no place: 0/2 nodes" in found[0].actual


@pytest.mark.parametrize(
    ("annotations", "things"),
    [
        ({"proxy-read-timeout": "600", "proxy-buffering": "off"}, []),
        ({"proxy-read-timeout": "300"}, ["read time-out of ingress web"]),
        ({}, ["read time-out of ingress web"]),
        ({"proxy-read-timeout": "600s"}, ["read time-out of ingress web"]),  # no number: nginx takes 60 s
        ({"proxy-read-timeout": "600", "proxy-buffering": "on"}, ["buffering of ingress web"]),
    ],
)
def test_an_ingress_must_wait_longer_than_the_gateway(annotations: dict[str, str], things: list[str]) -> None:
    full = {f"nginx.ingress.kubernetes.io/{key}": value for key, value in annotations.items()}
    ingress = {"metadata": {"name": "web", "annotations": full}, "spec": {"ingressClassName": "nginx"}}
    assert [check.thing for check in _bad(ingresses=[ingress])] == things


def test_beside_another_gateway_only_the_controller_is_asked_for() -> None:
    seen = dataclasses.replace(WHOLE, ours=None, functions=None, system=[_pod("controller", "a")], lease=None)
    checks = doctor_cluster.checks(seen, NOW, is_whole=False)
    assert [(check.thing, check.level) for check in checks] == [
        ("version", "ok"),
        ("controller in ks", "ok"),
    ]


def test_accounts_are_told_apart() -> None:
    assert rights_of("system:serviceaccount:ks:keystage-gateway") == ("gateway", GATEWAY)
    assert rights_of("system:serviceaccount:ks:keystage-controller") == ("controller", CONTROLLER)
    assert rights_of("ada@example.org")[1] == INSTALLER


def test_functions_behind_the_gateway_are_looked_at() -> None:
    functions = [
        FunctionStatus(name="slow", replicas=1, availableReplicas=1, envVars={"exec_timeout": "20m"}),
        FunctionStatus(name="quick", replicas=2, availableReplicas=0, envVars={"KEYSTAGE_DEADLINE_S": "30"}),
        FunctionStatus(name="asleep"),
    ]
    late = doctor_gateway.timeouts(functions, 600.0, is_known=True)
    assert [(check.thing, check.level) for check in late] == [
        ("time-outs of slow", "warn"),
        ("time-outs of quick", "ok"),
        ("time-outs of functions without their own", "ok"),
    ]
    assert late[0].actual.startswith("the shortest is KEYSTAGE_TIMEOUT_S 600 s of the gateway; on the way: ")
    assert "raise KEYSTAGE_TIMEOUT_S to 1200 s or more, or lower exec_timeout of slow" in late[0].advice
    assert late[1].actual.startswith("the shortest is KEYSTAGE_DEADLINE_S 30 s of quick; ")
    waiting = doctor_gateway.ready(functions)
    assert [(check.thing, check.level) for check in waiting] == [
        ("function slow", "ok"),
        ("function quick", "warn"),
    ]


def test_a_stock_gateway_lacks_what_needs_a_say_in_pods() -> None:
    stage = FunctionStatus(
        name="p-stage-3",
        image="ghcr.io/keystage/stage:0.1.0",
        labels={"keystage.role": "stage", "com.openfaas.scale.max": "8"},
        envVars={"KEYSTAGE_DEVICE": "cuda"},
    )
    community = {check.thing: check for check in doctor_openfaas.checks(limits("openfaas-ce"), [stage])}
    for thing in ("placement", "in-place resize", "parked pods"):
        assert community[thing].level == "warn"
        assert "Keystage's own gateway" in community[thing].advice
    assert community["scaling of stages"].actual == "OpenFaaS Community Edition: 1 to 5"
    assert community["function p-stage-3: KEYSTAGE_DEVICE"].level == "fail"
    assert "com.openfaas.scale.max" in " ".join(community)
    licensed = {check.thing: check for check in doctor_openfaas.checks(limits("openfaas-pro"), [])}
    assert licensed["scaling of stages"].level == "ok"
    assert licensed["placement"].level == "warn"


def test_exit_codes_and_text() -> None:
    well = Check(area="machine", level="ok", thing="x", bound="1", actual="2")
    ill = Check(area="machine", level="fail", thing="y", bound="1", actual="0", advice="do z")
    assert [exit_code([]), exit_code([well]), exit_code([ill, well])] == [0, 0, 2]
    assert text([ill, well]).splitlines() == [
        "ok   machine: x: needed 1, found 2",
        "fail machine: y: needed 1, found 0: do z",
        "1 ok, 0 warn, 1 fail",
    ]


def test_an_ingress_that_waits_least_is_the_shortest_on_the_way() -> None:
    annotations = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "30"}
    ingress = {"metadata": {"name": "web", "annotations": annotations}, "spec": {"ingressClassName": "nginx"}}
    links = doctor_cluster.ingress_links(dataclasses.replace(WHOLE, ingresses=[ingress]))
    (check,) = doctor_gateway.timeouts([FunctionStatus(name="f")], 300.0, is_known=True, outer=links)
    assert check.level == "warn"
    assert "proxy-read-timeout 30 s of ingress web; " in check.actual
    assert "proxy-read-timeout to 300 s or more" in check.advice
    assert doctor_cluster.ingress_links(WHOLE) == ()


def test_nodes_whose_clocks_are_ahead_are_named() -> None:
    ahead = _node("b")
    ahead["status"]["conditions"] = [{**READY[0], "lastHeartbeatTime": "2026-03-01T12:01:00Z"}]
    (found,) = _bad(nodes=[_node("a"), ahead])
    assert (found.thing, found.level) == ("clocks", "warn")
    assert found.actual.startswith("node b is 60.0 s ahead of this machine")
    assert "timedatectl" in found.advice


def test_parts_of_a_release_of_different_versions_are_named() -> None:
    pods = [_pod("gateway", "a"), _pod("controller", "a"), _pod("keysmanager", "a"), _pod("keysmanager", "b")]
    for pod, tag in zip(pods, ("0.2.0", "0.1.0", "0.2.0", "0.2.0"), strict=True):
        pod["spec"]["containers"][0]["image"] = f"registry.example:5000/keystage/control:{tag}"
    (found,) = [check for check in _bad(system=pods) if check.thing == "versions"]
    assert "controller 0.1.0" in found.actual
    assert "0.2.0 is not that of controller" in found.advice


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("ghcr.io/keystage/control:0.1.0", "0.1.0"),
        ("host:5000/x:v1.2", "1.2"),
        ("x:latest", ""),
        ("x@sha256:1.0", ""),
    ],
)
def test_images_tell_versions_by_their_tags(image: str, version: str) -> None:
    assert doctor_versions.of_image(image) == version

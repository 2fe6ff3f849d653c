"""From functions and pods to what the gateway routes by, and from a pod's output to lines."""

from __future__ import annotations

from typing import Any

import pytest

from keystage.gateway.backend import LogLine
from keystage.gateway.kubernetes import is_as_new, is_gone
from keystage.gateway.kubernetes_functions import surplus_of
from keystage.gateway.kubernetes_output import _parsed, merged
from keystage.gateway.kubernetes_view import KubernetesView
from keystage.kubernetes.api import (
    FUNCTION_LABEL,
    LEAVING_ANNOTATION,
    OVERRIDE_UNTIL_ANNOTATION,
    POOL_LABEL,
    WAKE_ANNOTATION,
)

NOW_S = 1_800_000_000.0


def resource(name: str = "f", *, spec: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": {**meta, **more.pop("meta", {})}, "spec": {"image": "i", **(spec or {})}, **more}


def pod(name: str = "f-0", *, ready: bool = True, ip: str = "10.0.0.1", **meta: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    labels = {FUNCTION_LABEL: "f", **meta.pop("labels", {})}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels, **meta},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "podIP": ip, "conditions": conditions},
    }


def view(functions: list[dict[str, Any]], pods: list[dict[str, Any]]) -> KubernetesView:
    found = KubernetesView()
    named = [{obj["metadata"]["name"]: obj for obj in objs} for objs in (functions, pods)]
    found.update(named[0], named[1], NOW_S)
    return found


@pytest.mark.parametrize(
    ("changed", "is_routed"),
    [
        ({}, True),
        ({"ready": False}, False),
        ({"ip": ""}, False),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False),
        ({"annotations": {LEAVING_ANNOTATION: "1"}}, False),
        ({"labels": {POOL_LABEL: "x"}}, False),
    ],
)
def test_only_a_pod_that_serves_and_stays_gets_requests(changed: dict[str, Any], is_routed: bool) -> None:
    state = view([resource()], [pod(**changed)]).states["f"]
    assert [e.address for e in state.ready] == (["10.0.0.1:8080"] if is_routed else [])


def test_an_address_of_ipv6_is_written_as_one() -> None:
    assert view([resource()], [pod(ip="fd00::1")]).states["f"].ready[0].address == "[fd00::1]:8080"


@pytest.mark.parametrize(
    ("spec", "annotations", "status", "wanted"),
    [
        ({}, {}, {}, 1),  # nobody decided: those there are
        ({}, {}, {"desired": 4}, 4),
        ({"replicas": 2}, {}, {"desired": 4}, 2),  # `kubectl scale`: no end yet
        ({"replicas": 0}, {OVERRIDE_UNTIL_ANNOTATION: str(NOW_S + 1)}, {"desired": 4}, 0),
        ({"replicas": 2}, {OVERRIDE_UNTIL_ANNOTATION: str(NOW_S - 1)}, {"desired": 4}, 4),
    ],
)
def test_replicas_are_a_persons_wish_while_it_holds_else_the_policys(
    spec: dict[str, Any], annotations: dict[str, str], status: dict[str, Any], wanted: int
) -> None:
    obj = resource(spec=spec, meta={"annotations": annotations}, status=status)
    assert view([obj], [pod()]).states["f"].replicas == wanted


def test_what_goes_or_does_not_fit_is_no_function_and_its_pods_are_still_known() -> None:
    going = resource(meta={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    broken = resource("g", spec={"envVars": ["x"]})
    found = view([going, broken], [pod()])
    assert found.states == {}
    assert list(found.pods) == ["f"]


def test_intent_and_trouble_show_and_the_namespace_does_not() -> None:
    waiting = pod("f-1", ready=False)
    reason = {"reason": "ImagePullBackOff", "message": "no such image"}
    waiting["status"]["containerStatuses"] = [{"state": {"waiting": reason}}]
    obj = resource(meta={"annotations": {WAKE_ANNOTATION: "1"}}, status={"trouble": ["no node has 8 GiB"]})
    state = view([obj], [pod(), waiting]).states["f"]
    assert state.waking
    assert state.trouble == ("no node has 8 GiB", "f-1: ImagePullBackOff: no such image")
    assert state.deployment.namespace == ""
    assert len(state.ready) == 1


def test_what_did_not_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = view([resource()], [pod()])
    same, functions = found._replicas["f-0"][0], {"f": found._records["f"][0]}
    read: list[str] = []
    from keystage.gateway import kubernetes_view

    real = kubernetes_view.replica_of
    monkeypatch.setattr(
        kubernetes_view,
        "replica_of",
        lambda obj, now_s: read.append(obj["metadata"]["name"]) or real(obj, now_s),
    )
    found.update(functions, {"f-0": same, "f-1": pod("f-1")}, NOW_S)
    assert read == ["f-1"]
    assert len(found.states["f"].ready) == 2


@pytest.mark.parametrize(
    ("found", "wanted", "patch"),
    [
        ({"a": 1}, {"a": 2}, {}),
        ({"a": 1, "b": 2}, {"a": 1}, {"b": None}),
        ({"b": None, "c": {}, "d": [], "e": False, "f": ""}, {}, {}),
        ({"m": {"x": "1", "y": "2"}}, {"m": {"x": "1"}}, {"m": {"y": None}}),
        ({"m": {"x": "1"}}, {"m": None}, {}),
        ({"replicas": 3}, {"replicas": None}, {}),
    ],
)
def test_surplus_is_taken_away_and_nothing_else(
    found: dict[str, Any], wanted: dict[str, Any], patch: dict[str, Any]
) -> None:
    assert surplus_of(found, wanted) == patch


def test_a_write_is_seen_when_the_view_has_it_or_something_later() -> None:
    def at(version: str, uid: str = "u") -> dict[str, Any]:
        return {"metadata": {"uid": uid, "resourceVersion": version}}

    assert not is_as_new(None, at("5"))
    assert not is_as_new(at("9"), at("10"))
    assert is_as_new(at("10"), at("10"))
    assert is_as_new(at("11"), at("9"))
    assert is_as_new(at("12", "made anew since"), at("9"))
    assert not is_as_new(at("8", "gone, in the same second"), at("9"))
    assert is_gone(None, "u")
    assert is_gone(at("1", "v"), "u")
    assert not is_gone(at("1"), "u")
    assert is_gone({"metadata": {"uid": "u", "deletionTimestamp": "x"}}, "u")


def test_output_of_several_pods_is_merged_by_time_and_each_keeps_its_order() -> None:
    one = list(
        _parsed(
            "one",
            b"2026-11-28T15:49:25.000001500Z a b\r\n2026-11-28T15:49:27Z \n2026-11-28T15:49:26Z back\n",
        )
    )
    assert [line.text for line in one] == ["a b", "", "back"]
    assert one[2].at_s == one[1].at_s  # a clock that was set back
    two = list(_parsed("two", b"failed to try resolving symlinks\n2026-11-28T16:49:26+01:00 x\n"))
    assert [line.text for line in two] == ["failed to try resolving symlinks", "x"]
    lines = merged([one, two], None)
    assert [(line.replica, line.text) for line in lines[1:]] == [
        ("one", "a b"),
        ("two", "x"),
        ("one", ""),
        ("one", "back"),
    ]
    assert merged([one, two], 1) == lines[-1:]
    assert merged([one], 0) == []
    assert merged([], None) == []
    assert merged([[LogLine(1.0, "p", "x")]], 5) == [LogLine(1.0, "p", "x")]

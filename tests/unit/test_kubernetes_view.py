"""Kubernetes objects as functions and replicas."""

from __future__ import annotations

from typing import Any

import pytest

from keystage.kubernetes.api import FUNCTION_LABEL, POOL_LABEL, TEMPLATE_LABEL
from keystage.kubernetes.gather import lost_of
from keystage.kubernetes.view import (
    NEVER_S,
    generation_of,
    lost_nodes,
    number,
    record_of,
    replica_of,
    seconds,
    trouble_of,
    unschedulable_since_s,
)

AT = "2026-07-01T12:00:00Z"
AT_S = 1782907200.0


def pod(**changes: Any) -> dict[str, Any]:
    labels = {FUNCTION_LABEL: "f", TEMPLATE_LABEL: "00000010aa", **changes.pop("labels", {})}
    return {
        "metadata": {
            "name": "f-1",
            "creationTimestamp": AT,
            "labels": {key: value for key, value in labels.items() if value is not None},
            "annotations": changes.pop("annotations", {}),
            **changes.pop("metadata", {}),
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": AT}],
            **changes,
        },
    }


def node(name: str, status: str, since: str = AT) -> dict[str, Any]:
    condition = {"type": "Ready", "status": status, "lastTransitionTime": since}
    return {"metadata": {"name": name}, "status": {"conditions": [condition]}}


def test_times_and_numbers_that_are_none_are_zero() -> None:
    assert seconds(AT) == seconds("2026-07-01T12:00:00.000000Z") == AT_S
    assert seconds(None) == seconds("soon") == 0.0
    assert number("1.5") == 1.5
    assert number(None) == number("x") == number("inf") == number("nan") == 0.0


def test_a_ready_pod_is_a_ready_replica() -> None:
    record = replica_of(pod(), 0.0)
    assert record is not None
    assert (record.state, record.address, record.node, record.via) == (
        "ready",
        "10.0.0.7:8080",
        "n1",
        "process",
    )
    assert (record.ready_at_s, record.started_at_s) == (AT_S, AT_S)
    assert record.generation == generation_of("00000010aa") == 16


def test_a_pod_of_no_function_is_no_replica() -> None:
    assert replica_of(pod(labels={FUNCTION_LABEL: None, POOL_LABEL: "s"}), 0.0) is None


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"metadata": {"deletionTimestamp": AT}}, "draining"),
        ({"annotations": {"keystage.dev/leaving": "1"}}, "draining"),
        ({"phase": "Failed", "annotations": {"keystage.dev/leaving": "1"}}, "draining"),
        ({"phase": "Failed"}, "failed"),
        ({"phase": "Succeeded"}, "failed"),
        ({"conditions": []}, "starting"),
        ({"labels": {POOL_LABEL: "s"}}, "starting"),
        ({"labels": {POOL_LABEL: "s"}, "annotations": {"keystage.dev/serving": "5"}}, "ready"),
        (
            {"labels": {POOL_LABEL: "s"}, "annotations": {"keystage.dev/serving": "5"}, "conditions": []},
            "starting",
        ),
        (
            {"conditions": [], "containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "failed",
        ),
    ],
)
def test_states(changes: dict[str, Any], state: str) -> None:
    record = replica_of(pod(**changes), 0.0)
    assert record is not None
    assert record.state == state


def test_a_replica_on_a_lost_node_has_failed() -> None:
    record = replica_of(pod(), 0.0, lost={"n1"})
    assert record is not None
    assert (record.state, record.reason) == ("failed", "node n1 is not ready")


def test_an_activated_pod_tells_how_it_started() -> None:
    notes = {
        "keystage.dev/serving": "7",
        "keystage.dev/activated": "6.5",
        "keystage.dev/via": "standby/memory",
    }
    record = replica_of(pod(labels={POOL_LABEL: "s"}, annotations=notes), 0.0)
    assert record is not None
    assert (record.via, record.source) == ("standby", "memory")
    assert (record.started_at_s, record.ready_at_s) == (6.5, 7.0)


def test_a_function_and_what_people_wish_of_it() -> None:
    obj: dict[str, Any] = {
        "metadata": {"name": "f", "namespace": "fn", "creationTimestamp": AT, "annotations": {}},
        "spec": {"image": "i", "labels": {"a": "b"}},
        "status": {"desired": 3, "cores": 1.5, "template": "00000010aa"},
    }
    record = record_of(obj)
    assert (record.deployment.service, record.deployment.image, record.created_at_s) == ("f", "i", AT_S)
    assert (record.desired, record.cores, record.generation) == (3, 1.5, 16)
    assert (record.override, record.wake) == (None, False)
    obj["spec"]["replicas"] = 0
    record = record_of(obj)
    assert record.override is not None
    assert (record.override.replicas, record.override.expires_at_s) == (0, NEVER_S)
    obj["metadata"]["annotations"] = {"keystage.dev/override-until": "99.5", "keystage.dev/wake": "1"}
    record = record_of(obj)
    assert record.override is not None
    assert record.override.expires_at_s == 99.5
    assert record.wake
    obj["status"] = {"desired": "many"}  # of a version that is not ours
    assert record_of(obj).desired is None


def test_trouble_is_in_the_words_of_who_has_it_and_told_once() -> None:
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2  nodes\nfit",
    }
    waiting = [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]
    ended = [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    creating = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert trouble_of([pod(conditions=[unplaced])]) == ("f-1: Unschedulable: 0/2 nodes fit",)
    assert trouble_of([pod(containerStatuses=waiting)] * 2) == ("f-1: ImagePullBackOff: no such image",)
    assert trouble_of([pod(containerStatuses=ended)]) == ("f-1: ended with code 137 (OOMKilled)",)
    assert trouble_of([pod(containerStatuses=creating)]) == ()
    assert trouble_of([pod(containerStatuses=waiting, metadata={"deletionTimestamp": AT})]) == ()
    assert unschedulable_since_s(pod(conditions=[unplaced | {"lastTransitionTime": AT}])) == AT_S
    assert unschedulable_since_s(pod()) == 0.0


def test_nodes_are_lost_after_a_while_and_never_all_of_them() -> None:
    nodes = [node("a", "True"), node("b", "Unknown"), node("c", "False", "2026-07-01T12:00:09Z")]
    assert lost_nodes(nodes, AT_S + 10.0, 2.0) == {"b"}
    assert lost_of(nodes, AT_S + 10.0) == {"b"}
    assert lost_of(nodes[1:], AT_S + 10.0) == frozenset()

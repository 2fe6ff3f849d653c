"""CPU in pods' resources within their class, and what is free on nodes as the scheduler counts it."""

from __future__ import annotations

from typing import Any

import pytest

from keystage.kubernetes.cores import (
    asked_of,
    base_cores,
    cores_in,
    cpu_of,
    deployed_resources,
    given_to,
    quantity,
    threads_of,
    with_cores,
)
from keystage.kubernetes.resize import progress_of, resize_patch
from keystage.kubernetes.room import promised, rooms_of, tolerates
from keystage.local.api import Deployment

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100m", 0.1), ("2", 2), ("1.5", 1.5), ("64Mi", 64 << 20), ("1Gi", 1 << 30), ("1e3", 1000),
        ("5k", 5000), ("12E", 12e18), (3, 3), ("", 0), ("x", 0), (None, 0), ("1.2.3", 0), (True, 0),
        (float("nan"), 0), ("-1", -1),
    ],
)  # fmt: skip
def test_quantities(text: object, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


GUARANTEED = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
BURSTABLE = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}


def test_guaranteed_stays_guaranteed() -> None:
    assert with_cores(GUARANTEED, 2.5, 1.0) == {
        "requests": {"cpu": "2500m", "memory": "1Gi"},
        "limits": {"cpu": "2500m", "memory": "1Gi"},
    }


def test_burstable_keeps_its_request_below_its_limit_in_proportion() -> None:
    assert cpu_of(with_cores(BURSTABLE, 3.0, 1.0)) == (1.5, 3.0)
    close = {"requests": {"cpu": "999m"}, "limits": {"cpu": "1"}}
    request, limit = cpu_of(with_cores(close, 0.002, 1.0))
    assert request < limit  # with equal memory it would be Guaranteed, and the server refuses that


def test_what_is_not_stated_is_not_added() -> None:
    assert with_cores({}, 4.0, 1.0) == {}
    assert with_cores({"requests": {"cpu": "100m"}}, 3.0, 1.0) == {"requests": {"cpu": "300m"}}
    assert with_cores({"limits": {"cpu": "1"}}, 2.0, 1.0) == {
        "limits": {"cpu": "2000m"},
        "requests": {"cpu": "2000m"},  # as the server sets it where it is not stated
    }
    assert with_cores({"limits": {"memory": "1Gi"}}, 2.0, 1.0) == {"limits": {"memory": "1Gi"}}


def test_cores_as_deployed_and_as_they_are() -> None:
    stage = Deployment(service="s", envVars={"KEYSTAGE_THREADS": "2"})
    assert base_cores(stage) == 2
    assert base_cores(Deployment(service="s", limits={"cpu": "1500m"})) == 1.5
    deployed = deployed_resources(stage, {"cpu": "100m"})
    assert deployed == {"requests": {"cpu": "100m"}}
    assert cores_in({"requests": {"cpu": "300m"}}, deployed, 2.0) == pytest.approx(6.0)
    assert cores_in({"requests": {"memory": "1Gi"}}, {}, 2.0) is None
    assert cores_in({"limits": {"cpu": "700m"}}, deployed, 2.0) == pytest.approx(0.7)
    assert [threads_of(c) for c in (0.2, 1.0, 1.2, 3.0)] == [1, 1, 2, 3]


def pod(name: str = "a", node: str = "n", cpu: str = "1", *, given: str = "", **status: Any) -> Object:
    resources = {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}
    entry: Object = {"name": "function", "state": {"running": {}}}
    if given:
        entry["resources"] = {"requests": {"cpu": given}, "limits": {"cpu": given}}
        entry["allocatedResources"] = {"cpu": given}
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": node, "containers": [{"name": "function", "resources": resources}]},
        "status": {"phase": "Running", "containerStatuses": [entry], **status},
    }


def test_a_resize_in_progress_counts_with_the_larger_of_both() -> None:
    assert promised(pod(cpu="2", given="1"))["cpu"] == 2
    assert promised(pod(cpu="1", given="2"))["cpu"] == 2
    assert (cpu_of(asked_of(pod(cpu="2", given="1"))), cpu_of(given_to(pod(cpu="2", given="1")))) == (
        (2.0, 2.0),
        (1.0, 1.0),
    )


def test_init_containers_and_overhead_count_as_the_scheduler_counts_them() -> None:
    made = pod(cpu="1")
    made["spec"]["initContainers"] = [
        {"name": "fetch", "resources": {"requests": {"cpu": "3"}}},
        {"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
    ]
    made["spec"]["overhead"] = {"cpu": "250m"}
    assert promised(made)["cpu"] == pytest.approx(3.25)
    made["spec"]["initContainers"][0]["resources"]["requests"]["cpu"] = "1"
    assert promised(made)["cpu"] == pytest.approx(1.75)


def node(name: str = "n", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": spec,
        "status": {
            "allocatable": {
                "cpu": "4",
                "memory": "8Gi",
                "pods": "10",
                "keystage.dev/gpu0": "80",
                "keystage.dev/gpu1": "0",
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def test_room_is_what_is_left() -> None:
    ended = pod("done", phase="Succeeded")
    rooms = rooms_of([node()], [pod("a"), pod("b", cpu="500m"), pod("c", node="other"), ended])
    room = rooms["n"]
    assert room.free("cpu") == 2.5
    assert room.free("pods") == 8
    assert room.gpus == (0,)
    assert room.holds({"cpu": 1.0}) == 2
    assert room.holds({"cpu": 0.5, "memory": 4 << 30}) == 2
    assert room.holds({"cpu": 0.1}) == 8  # pods
    assert room.holds({"example.com/other": 1.0}) == 0


def test_nodes_that_take_nothing_new() -> None:
    lost = node("lost")
    lost["status"]["conditions"][0]["status"] = "Unknown"
    leaving = node("leaving")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    rooms = rooms_of(
        [node("cordoned", unschedulable=True), lost, leaving, node("tainted", taints=[taint]),
         node("soft", taints=[soft])], [],
    )  # fmt: skip
    why = {name: room.kept_out() for name, room in rooms.items()}
    assert why == {
        "cordoned": "it is cordoned",
        "lost": "it is not ready",
        "leaving": "it is being removed",
        "tainted": "it is tainted gpu=yes:NoSchedule",
        "soft": "",
    }
    assert rooms["tainted"].kept_out([{"key": "gpu", "operator": "Exists"}]) == ""


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "w"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
    ],
)
def test_tolerations(toleration: Object, is_tolerated: bool) -> None:
    assert tolerates(toleration, {"key": "k", "value": "v", "effect": "NoSchedule"}) is is_tolerated


AT_S = 1_800_000_000.0
AT = "2027-01-15T08:00:00Z"


def pending(reason: str, since: str = AT) -> Object:
    condition = {
        "type": "PodResizePending", "status": "True", "reason": reason, "message": "words",
        "lastTransitionTime": since,
    }  # fmt: skip
    return pod(cpu="2", given="1", conditions=[condition])


def test_progress_of_a_resize() -> None:
    assert progress_of(pod(cpu="1", given="1"), AT_S) == ("settled", "")
    assert progress_of(pod(cpu="2", given="1"), AT_S) == ("moving", "")
    assert progress_of(pending("Infeasible"), AT_S) == ("infeasible", "Infeasible: words")
    assert progress_of(pending("Deferred"), AT_S + 5) == ("deferred", "Deferred: words")
    assert progress_of(pending("Deferred"), AT_S + 11) == ("infeasible", "Deferred: words (for 10 s)")
    moving = {"type": "PodResizeInProgress", "status": "True", "lastTransitionTime": AT}
    assert progress_of(pod(cpu="2", given="1", conditions=[moving]), AT_S + 5)[0] == "moving"
    assert progress_of(pod(cpu="2", given="1", conditions=[moving]), AT_S + 61)[0] == "infeasible"


def test_a_resize_changes_cpu_and_nothing_else() -> None:
    deployed = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    assert resize_patch(pod(), 2.0, deployed, 1.0) == {
        "spec": {
            "containers": [
                {"name": "function", "resources": {"requests": {"cpu": "2000m"}, "limits": {"cpu": "2000m"}}}
            ]
        }
    }
    assert resize_patch(pod(), 1.0, deployed, 1.0) is None
    assert resize_patch(pod(), 2.0, {}, 1.0) is None

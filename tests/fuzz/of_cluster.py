"""Targets of the Kubernetes part: objects of any age, half filled, or written by somebody else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec

from fuzz.of_control import DEPLOYMENT, STAGE
from fuzz.target import UNREADABLE, FuzzError, Ready

AT = "2026-07-01T12:00:00Z"
_META = {"name": "f-1", "uid": "u1", "namespace": "n", "creationTimestamp": AT, "resourceVersion": "5"}


def _function(deployment: dict[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in deployment.items() if key not in ("service", "namespace")}
    return {
        "metadata": {
            **_META,
            "name": "a-1",
            "annotations": {"keystage.dev/override-until": "5", "keystage.dev/wake": "1"},
        },
        "spec": {**spec, "replicas": 3},
        "status": {"desired": 2, "cores": 1.5, "template": "0a1b2c3d4e", "ready": 1},
    }


_POD: dict[str, Any] = {
    "metadata": {
        **_META,
        "labels": {
            "keystage.dev/function": "a-1", "keystage.dev/template": "0a1b2c3d4e", "keystage.dev/pool": "p",
            "keystage.dev/pipeline": "p",
        },
        "annotations": {
            "keystage.dev/leaving": "7", "keystage.dev/activated": "5", "keystage.dev/serving": "6",
            "keystage.dev/via": "standby/memory", "keystage.dev/cores": "2", "keystage.dev/site": "~n1",
        },
        "ownerReferences": [{"controller": True, "uid": "u0"}],
        "deletionTimestamp": AT,
    },
    "spec": {
        "nodeName": "n1",
        "containers": [{"name": "c",
        "resources": {"requests": {"cpu": "100m", "nvidia.com/gpu": "1"}, "limits": {}}}],
        "initContainers": [{"name": "i", "restartPolicy": "Always",
        "resources": {"requests": {"memory": "1Gi"}}}],
        "overhead": {"cpu": "5m"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "status": {
        "phase": "Running", "podIP": "10.0.0.7", "reason": "", "message": "",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": AT},
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m",
            "lastTransitionTime": AT},
        ],
        "containerStatuses": [
            {"name": "c", "restartCount": 2, "state": {"running": {"startedAt": AT}, "waiting": {"reason":
            "CrashLoopBackOff"}},
             "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "finishedAt": AT,
             "message": "x"}}}
        ],
    },
}  # fmt: skip
_NODE: dict[str, Any] = {
    "metadata": {"name": "n1", "labels": {"zone": "a"}, "annotations": {}},
    "spec": {"unschedulable": False, "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]},
    "status": {
        "allocatable": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": AT}],
    },
}


def _is_like(seed: Any, found: Any) -> bool:
    """Whether an API server could hold this: members may lack or differ, but have the types of its schema."""
    if isinstance(seed, dict):
        if not isinstance(found, dict):
            return False
        texts = all(isinstance(value, str) for value in seed.values())
        return all(
            _is_like(seed[key], value) if key in seed else isinstance(value, str) or not texts
            for key, value in found.items()
        )
    if isinstance(seed, list):
        return isinstance(found, list) and all(_is_like(seed[0], one) for one in found)
    if isinstance(seed, bool) or not isinstance(seed, (int, float)):
        return type(seed) is type(found)
    return isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < 2**63


def objects(scratch: Path) -> Ready:
    """Custom resources, pods, nodes: views for gateways, scenes for the controller, rooms, troubles."""
    from keystage.kubernetes import room, view
    from keystage.kubernetes.backoff import Backoff
    from keystage.kubernetes.gather import Gatherer, Objects
    from keystage.kubernetes.manifests import Settings
    from keystage.kubernetes.scene import pod_of
    from keystage.kubernetes.wishes import Wished

    gatherer = Gatherer(Settings("n", "n"), lambda _deployment: 1 << 30, Backoff())

    def run(data: bytes) -> None:
        found = json.loads(data.decode("utf-8", "surrogatepass"))
        if not isinstance(found, dict):
            return
        function, pod, node = (found.get(name) for name in ("function", "pod", "node"))
        if (
            not isinstance(function, dict)
            or not _is_like(_META, function.get("metadata"))
            or "name" not in function["metadata"]
        ):
            return
        if not _is_like(_POD, pod) or not _is_like(_NODE, node):
            return
        if any("name" not in one.get("metadata", {}) for one in (pod, node)):
            return
        if "uid" not in function["metadata"]:
            return
        with contextlib.suppress(msgspec.ValidationError):
            record = view.record_of(function)
            if record.desired is not None and record.desired < 0:
                raise FuzzError(f"{record}")
        view.replica_of(pod, 5.0)
        view.trouble_of([pod])
        view.lost_nodes([node], 5.0, 40.0)
        pod_of(pod)
        room.rooms_of([node], [pod])
        place = {str(one["metadata"]["name"]): one for one in (pod,)}
        nodes = {str(node["metadata"]["name"]): node}
        names = {str(function["metadata"]["name"]): function}
        gatherer.gather(
            Objects(functions=names, pods=place, nodes=nodes, deployments={}, others={}), Wished({}, {}), 9.0
        )

    refusals = (json.JSONDecodeError, *UNREADABLE)
    seeds = [{"function": _function(kind), "pod": _POD, "node": _NODE} for kind in (DEPLOYMENT, STAGE)]
    return Ready(run, refusals, tuple(json.dumps(seed).encode() for seed in seeds))

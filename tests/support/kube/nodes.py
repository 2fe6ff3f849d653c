"""Plays the nodes: machines that exist, are cordoned, are lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from support.kube.answers import Object
from support.kube.deletion import delete
from support.kube.registry import PLAYER, Registry
from support.kube.writes import now_text


class Nodes:
    """Nodes of the cluster.

    Args:
        registry: the API.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._count = 0

    def add(
        self,
        name: str = "",
        *,
        cpu: str = "8",
        memory: str = "32Gi",
        pods: int = 110,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] = (),
        annotations: Mapping[str, str] | None = None,
        **extended: str,
    ) -> Object:
        """A ready node. Extended resources: `add(..., **{"keystage.dev/gpu0": "80"})`."""
        self._count += 1
        name = name or f"node{self._count}"
        body: Object = {
            "metadata": {
                "name": name,
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
                "annotations": dict(annotations or {}),
            },
            "spec": {"taints": [dict(t) for t in taints]} if taints else {},
        }
        resource = self._registry.named("nodes")
        self._registry.create(resource, "", body, PLAYER)
        room = {"cpu": cpu, "memory": memory, "pods": str(pods), **extended}
        status = {
            "capacity": room,
            "allocatable": room,
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": name},
            ],
            "conditions": [_ready("True", "KubeletReady")],
            "nodeInfo": {**dict.fromkeys(_INFO, ""), "kubeletVersion": "v1.36.2", "architecture": "amd64"},
        }
        return self._status(name, status)

    def cordon(self, name: str, *, is_cordoned: bool = True) -> Object:
        """No new pods there, or again some."""
        return self._change(name, {"spec": {"unschedulable": is_cordoned or None}})

    def taint(self, name: str, *taints: Mapping[str, str]) -> Object:
        """Replaces its taints."""
        return self._change(name, {"spec": {"taints": [dict(t) for t in taints] or None}})

    def label(self, name: str, labels: Mapping[str, str | None]) -> Object:
        """Sets labels, or removes them with None."""
        return self._change(name, {"metadata": {"labels": dict(labels)}})

    def offer(self, name: str, room: Mapping[str, str | None]) -> Object:
        """Changes what it has (capacity and allocatable), for example a device plugin's resources."""
        return self._status(name, {"capacity": dict(room), "allocatable": dict(room)})

    def lose(self, name: str) -> Object:
        """Its kubelet is heard no longer: Ready is unknown, it is tainted, its pods are not ready."""
        self._status(name, {"conditions": [_ready("Unknown", "NodeStatusUnknown")]})
        node = self.taint(
            name,
            *(
                {"key": "node.kubernetes.io/unreachable", "effect": effect, "timeAdded": now_text()}
                for effect in ("NoSchedule", "NoExecute")
            ),
        )
        pods = self._registry.named("pods")
        for pod in self._registry.list(pods)[1]:
            if pod["spec"].get("nodeName") == name:
                conditions = copy.deepcopy(pod["status"].get("conditions", []))
                for condition in conditions:
                    if condition["type"] in ("Ready", "ContainersReady"):
                        condition["status"] = "False"
                self._registry.modify(pods, pod, {"status": {"conditions": conditions}}, subresource="status")
        return node

    def remove(self, name: str) -> None:
        """The node is gone from the API; its pods follow (the real pod collector takes them away)."""
        resource, pods = self._registry.named("nodes"), self._registry.named("pods")
        delete(self._registry, resource, "", name, {})
        for pod in self._registry.list(pods)[1]:
            if pod["spec"].get("nodeName") == name:
                meta = pod["metadata"]
                delete(self._registry, pods, meta["namespace"], meta["name"], {"gracePeriodSeconds": 0})

    def _change(self, name: str, changes: dict[str, Any]) -> Object:
        resource = self._registry.named("nodes")
        return self._registry.modify(resource, self._registry.get(resource, "", name), changes)

    def _status(self, name: str, status: Object) -> Object:
        resource = self._registry.named("nodes")
        node = self._registry.get(resource, "", name)
        return self._registry.modify(resource, node, {"status": status}, subresource="status")


_INFO = (
    "machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion",
    "kubeProxyVersion", "operatingSystem",
)  # fmt: skip


def _ready(status: str, reason: str) -> Object:
    now = now_text()
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }

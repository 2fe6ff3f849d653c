"""What is free on the nodes of a cluster, as the scheduler counts it. Pure.

Before it: nodes and pods as JSON. After it: the controller's view of nodes, caps, and a second look at
places before they are stated. A node that is cordoned, tainted or not ready has no room for anything new.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keystage.kubernetes.api import GPU_RESOURCE
from keystage.kubernetes.cores import quantity
from keystage.kubernetes.view import condition, is_ended, labels_of, name_of

Object = Mapping[str, Any]
VENDOR_GPU = "nvidia.com/gpu"
PODS_RESOURCE = "pods"
GPU_TOLERATION = {"key": VENDOR_GPU, "operator": "Exists", "effect": "NoSchedule"}
"""What stage pods with a GPU tolerate: such nodes are often kept for them."""
_GPU = re.compile(re.escape(GPU_RESOURCE) + r"([0-9]{1,3})")
_KEEPS_OUT = ("NoSchedule", "NoExecute")


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """One node.

    Attributes:
        node: its name.
        labels: its labels.
        total: allocatable by resource name (cores, bytes, GiB, pods).
        used: what pods on it have been promised.
        closed: why nothing new may come, empty where it may.
        taints: those that keep out what does not tolerate them.
        gpus: indices of its GPUs.
    """

    node: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    used: Mapping[str, float]
    closed: str = ""
    taints: tuple[Object, ...] = ()
    gpus: tuple[int, ...] = ()

    def free(self, resource: str) -> float:
        """What may still be promised of a resource."""
        return max(0.0, self.total.get(resource, 0.0) - self.used.get(resource, 0.0))

    def kept_out(self, tolerations: Sequence[Object] = ()) -> str:
        """Why a pod with these tolerations may not come, empty where it may."""
        if self.closed:
            return self.closed
        for taint in self.taints:
            if not any(tolerates(toleration, taint) for toleration in tolerations):
                return f"it is tainted {taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        return ""

    def holds(self, need: Mapping[str, float]) -> int:
        """How many pods of this need fit beside those that are there."""
        most = int(self.free(PODS_RESOURCE))
        for resource, amount in need.items():
            if amount > 0:
                most = min(most, int(self.free(resource) / amount * (1 + 1e-9)))
        return most


def rooms_of(nodes: Iterable[Object], pods: Iterable[Object]) -> dict[str, Room]:
    """The nodes by name.

    Args:
        nodes: all nodes.
        pods: every pod that takes room, of any namespace.
    """
    used: dict[str, Counter[str]] = {}
    for pod in pods:
        node = pod.get("spec", {}).get("nodeName")
        if node and not is_ended(pod):
            used.setdefault(node, Counter()).update(promised(pod))
    found = {}
    for node in nodes:
        name = name_of(node)
        allocatable = node.get("status", {}).get("allocatable") or {}
        found[name] = Room(
            node=name,
            labels=labels_of(node),
            total={resource: quantity(text) for resource, text in allocatable.items()},
            used=used.get(name, Counter()),
            closed=_closed(node),
            taints=tuple(
                taint
                for taint in node.get("spec", {}).get("taints") or ()
                if taint.get("effect") in _KEEPS_OUT
            ),
            gpus=tuple(
                sorted(  # a resource that is offered no longer stays with nothing of it
                    int(match.group(1))
                    for resource, text in allocatable.items()
                    if (match := _GPU.fullmatch(resource)) and quantity(text) > 0
                )
            ),
        )
    return found


def promised(pod: Object) -> dict[str, float]:
    """What a pod takes of its node: requests of its containers, or of the largest init container.

    A resize that was asked for and is not yet in force counts with the larger of both, as with the scheduler.
    """
    spec, status = pod.get("spec", {}), pod.get("status", {})
    allocated = {
        entry.get("name"): entry.get("allocatedResources") or {}
        for entry in status.get("containerStatuses") or ()
    }
    sum_: Counter[str] = Counter()
    for container in spec.get("containers") or ():
        sum_.update(_larger(_requests(container), _numbers(allocated.get(container.get("name"), {}))))
    largest: dict[str, float] = {}
    beside: Counter[str] = Counter()
    for container in spec.get("initContainers") or ():
        mine = _requests(container)
        if container.get("restartPolicy") == "Always":  # a sidecar: it stays
            beside.update(mine)
        largest = _larger(largest, dict(Counter(mine) + beside))
    sum_.update(beside)
    total = Counter(_larger(dict(sum_), largest))
    total.update(_numbers(spec.get("overhead") or {}))
    total[PODS_RESOURCE] = 1
    return dict(total)


def need_of(resources: Mapping[str, Mapping[str, str]]) -> dict[str, float]:
    """What a pod with one container of these resources takes of its node."""
    return _requests({"resources": resources})


def _requests(container: Object) -> dict[str, float]:
    """Requests; where there is none of a resource its limit is the request, as at the API server."""
    resources = container.get("resources") or {}
    return _numbers({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _numbers(resources: Mapping[str, object]) -> dict[str, float]:
    return {name: quantity(text) for name, text in resources.items()}


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in one.keys() | other.keys()}


def _closed(node: Object) -> str:
    if node.get("metadata", {}).get("deletionTimestamp"):
        return "it is being removed"
    if node.get("spec", {}).get("unschedulable"):
        return "it is cordoned"
    if condition(node, "Ready").get("status") != "True":
        return "it is not ready"
    return ""


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a pod with this toleration may run beside this taint."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key, exists = toleration.get("key") or "", toleration.get("operator") == "Exists"
    if not key:
        return exists
    return key == taint.get("key") and (
        exists or (toleration.get("value") or "") == (taint.get("value") or "")
    )

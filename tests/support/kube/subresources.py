"""Subresources that have an object of their own: scale, binding, eviction."""

from __future__ import annotations

import json
from typing import Any

from support.kube.answers import Cause, Object, Refused, bad_request, conflict, invalid, method_not_allowed
from support.kube.deletion import delete
from support.kube.kinds import Resource, ScalePaths
from support.kube.registry import MERGE, Registry, patched
from support.kube.selectors import expression, of_label_selector
from support.kube.writes import now_text


def _at(item: Object, path: tuple[str, ...]) -> Any:
    value: Any = item
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _selector_text(found: Any) -> str:
    if isinstance(found, dict):
        parts = [f"{k}={v}" for k, v in (found.get("matchLabels") or {}).items()]
        return ",".join(parts + [expression(r) for r in found.get("matchExpressions") or ()])
    return found or ""


def scale_of(resource: Resource, item: Object) -> Object:
    """The `Scale` of an object; a missing wish counts as 0."""
    paths = _paths(resource)
    meta = {
        k: item["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    wanted = _at(item, paths.wanted)
    body: Object = {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": meta,
        "spec": {"replicas": wanted} if wanted else {},
        "status": {"replicas": _at(item, paths.present) or 0},
    }
    if selector := _selector_text(_at(item, paths.selector)):
        body["status"]["selector"] = selector
    return body


def _paths(resource: Resource) -> ScalePaths:
    if resource.scale is None:
        raise method_not_allowed()
    return resource.scale


def get_scale(registry: Registry, resource: Resource, namespace: str, name: str) -> Object:
    """GET of scale; a custom resource without the number has none."""
    item = registry.get(resource, namespace, name)
    if resource.is_custom and _at(item, _paths(resource).wanted) is None:
        path = "." + ".".join(_paths(resource).wanted)
        text = f'Internal error occurred: the spec replicas field "{path}" does not exist'
        raise Refused(500, "InternalError", text)
    return scale_of(resource, item)


def put_scale(
    registry: Registry, resource: Resource, namespace: str, name: str, body: Any, content: str, manager: str
) -> Object:
    """PUT (content empty) or PATCH of scale."""
    with registry.store.changed:
        item = registry.get(resource, namespace, name)
        present = scale_of(resource, item)
        if content:
            body = patched(
                _AS_CUSTOM, present, body, MERGE if content.startswith("application/strategic") else content
            )
        if not isinstance(body, dict) or body.get("kind", "Scale") != "Scale":
            raise bad_request("the object is no Scale")
        wanted = (body.get("spec") or {}).get("replicas", 0)
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise bad_request(f"spec.replicas of Scale must be an integer, not {wanted!r}")
        if wanted < 0:
            cause = Cause(
                "FieldValueInvalid",
                f"Invalid value: {wanted}: must be greater than or equal to 0",
                "spec.replicas",
            )
            raise invalid("autoscaling", "Scale", name, [cause])
        changes: Object = {"metadata": {}}
        for key in ("resourceVersion", "uid"):
            if body.get("metadata", {}).get(key):
                changes["metadata"][key] = body["metadata"][key]
        node = changes
        *outer, last = _paths(resource).wanted
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = wanted
        made, _ = registry.patch(
            resource, namespace, name, json.dumps(changes).encode(), MERGE, manager, subresource="scale"
        )
        return scale_of(resource, made)


def bind(registry: Registry, namespace: str, name: str, body: Any, manager: str) -> Object:
    """POST of binding: the scheduler's verdict."""
    pods = registry.named("pods")
    with registry.store.changed:
        pod = registry.get(pods, namespace, name)
        node = (body.get("target") or {}).get("name") if isinstance(body, dict) else None
        if not node:
            cause = Cause("FieldValueRequired", "Required value", "target.name")
            raise invalid("", "Binding", name, [cause])
        if "deletionTimestamp" in pod["metadata"]:
            raise conflict(
                "", "pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host"
            )
        if present := pod["spec"].get("nodeName"):
            raise conflict("", "pods/binding", name, f"pod {name} is already assigned to node {present!r}")
        conditions = [c for c in pod["status"].get("conditions", ()) if c["type"] != "PodScheduled"]
        conditions.append(
            {
                "type": "PodScheduled",
                "status": "True",
                "lastProbeTime": None,
                "lastTransitionTime": now_text(),
            }
        )
        changes = {"spec": {"nodeName": node}, "status": {"conditions": conditions}}
        registry.modify(pods, pod, changes, subresource="binding", manager=manager)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def evict(registry: Registry, namespace: str, name: str, body: Any) -> Object:
    """POST of eviction: a deletion that PodDisruptionBudgets may refuse."""
    pods, budgets = registry.named("pods"), registry.named("poddisruptionbudgets")
    with registry.store.changed:
        pod = registry.get(pods, namespace, name)
        for budget in registry.list(budgets, namespace)[1]:
            matches = of_label_selector(budget["spec"].get("selector") or {})
            if matches(pod) and not disruptions_allowed(registry, budget):
                raise Refused(
                    429,
                    "TooManyRequests",
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    {"causes": [{"reason": "DisruptionBudget", "message": budget["metadata"]["name"]}]},
                )
        options = (body.get("deleteOptions") or {}) if isinstance(body, dict) else {}
        delete(registry, pods, namespace, name, options)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def disruptions_allowed(registry: Registry, budget: Object) -> int:
    """How many of a budget's pods may go now."""
    spec, namespace = budget["spec"], budget["metadata"]["namespace"]
    matches = of_label_selector(spec.get("selector") or {})
    pods = [p for p in registry.list(registry.named("pods"), namespace)[1] if matches(p)]
    healthy = sum(is_ready(p) and "deletionTimestamp" not in p["metadata"] for p in pods)
    if "minAvailable" in spec:
        return max(0, healthy - _count(spec["minAvailable"], len(pods), rounds_up=True))
    unavailable = len(pods) - healthy
    return max(0, _count(spec.get("maxUnavailable", 0), len(pods), rounds_up=True) - unavailable)


def _count(given: int | str, total: int, *, rounds_up: bool) -> int:
    if isinstance(given, int):
        return given
    exact = int(given.rstrip("%")) * total
    return -(-exact // 100) if rounds_up else exact // 100


def is_ready(pod: Object) -> bool:
    """Its Ready condition is true."""
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", ())
    )


def _scale_shape() -> Resource:
    from support.kube.schema import Typed

    typed = Typed({"x-kubernetes-preserve-unknown-fields": True}, {}, is_builtin=False)
    return Resource("autoscaling", "v1", "scales", "Scale", typed, is_custom=True)


_AS_CUSTOM = _scale_shape()

__all__ = [
    "bind",
    "disruptions_allowed",
    "evict",
    "get_scale",
    "is_ready",
    "put_scale",
    "scale_of",
]

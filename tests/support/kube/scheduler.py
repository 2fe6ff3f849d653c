"""Plays the scheduler: binds pods by affinity, taints and room, or says why it cannot. Deterministic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from support.kube.answers import Object, Refused
from support.kube.quantities import value_of
from support.kube.registry import Registry
from support.kube.selectors import by_labels, expression
from support.kube.subresources import bind
from support.kube.writes import now_text

Room = dict[str, Fraction]


class Scheduler:
    """Default scheduler.

    Args:
        registry: the API.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def schedule(self) -> int:
        """One pass over unbound pods, by age and name.

        Returns:
            How many were bound.
        """
        registry = self._registry
        with registry.store.changed:
            pods = registry.list(registry.named("pods"))[1]
            nodes = registry.list(registry.named("nodes"))[1]
            waiting = [
                p for p in pods
                if not p["spec"].get("nodeName") and "deletionTimestamp" not in p["metadata"]
                and not p["spec"].get("schedulingGates")
            ]  # fmt: skip
            bound = 0
            for pod in sorted(
                waiting, key=lambda p: (int(p["metadata"]["resourceVersion"]), p["metadata"]["name"])
            ):
                pods = registry.list(registry.named("pods"))[1]
                bound += self._place(pod, nodes, pods)
            return bound

    def _place(self, pod: Object, nodes: list[Object], pods: list[Object]) -> bool:
        why: dict[str, int] = {}
        fitting: list[Object] = []
        for node in nodes:
            reason = obstacle(pod, node, pods)
            if reason:
                why[reason] = why.get(reason, 0) + 1
            else:
                fitting.append(node)
        meta = pod["metadata"]
        if not fitting:
            self._refuse(pod, len(nodes), why)
            return False
        best = max(fitting, key=lambda n: (preference(pod, n), _free_ratio(n, pods), n["metadata"]["name"]))
        try:
            bind(
                self._registry,
                meta["namespace"],
                meta["name"],
                {"target": best["metadata"]},
                "kube-scheduler",
            )
        except Refused as refused:
            if refused.code not in (404, 409):
                raise
            return False
        return True

    def _refuse(self, pod: Object, count: int, why: dict[str, int]) -> None:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
        message = f"0/{count} nodes are available: {reasons or 'no nodes available to schedule pods'}."
        present = [c for c in pod["status"].get("conditions", ()) if c["type"] == "PodScheduled"]
        if present and present[0].get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": now_text(),
        }
        pods = self._registry.named("pods")
        self._registry.modify(
            pods, pod, {"status": {"conditions": [condition]}}, subresource="status", manager="kube-scheduler"
        )


def obstacle(pod: Object, node: Object, pods: list[Object]) -> str:
    """Why a pod cannot be on a node, empty: it can."""
    spec = pod["spec"]
    if node["spec"].get("unschedulable") and not _tolerates(
        spec, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return "node(s) were unschedulable"
    for taint in node["spec"].get("taints", ()):
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(spec, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    labels = node["metadata"].get("labels", {})
    if any(labels.get(k) != v for k, v in spec.get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(_term(t, node) for t in required["nodeSelectorTerms"]):
        return "node(s) didn't match Pod's node affinity/selector"
    if not any(
        c["type"] == "Ready" and c["status"] == "True" for c in node.get("status", {}).get("conditions", ())
    ):
        return "node(s) were not ready"
    free = free_room(node, pods)
    for name, amount in requests_of(spec).items():
        if amount > free.get(name, Fraction(0)):
            return f"Insufficient {name}" if name != "pods" else "Too many pods"
    return ""


def preference(pod: Object, node: Object) -> int:
    """Sum of the weights of preferred terms that the node meets."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    return sum(int(p["weight"]) for p in preferred if _term(p["preference"], node))


def requests_of(spec: Object) -> Room:
    """What a pod asks for."""
    total: Room = {"pods": Fraction(1)}
    for container in spec["containers"]:
        for name, text in container.get("resources", {}).get("requests", {}).items():
            total[name] = total.get(name, Fraction(0)) + value_of(text)
    return total


def free_room(node: Object, pods: list[Object]) -> Room:
    """What a node has left."""
    room = {k: value_of(v) for k, v in node.get("status", {}).get("allocatable", {}).items()}
    for pod in pods:
        is_there = pod["spec"].get("nodeName") == node["metadata"]["name"]
        if is_there and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            for name, amount in requests_of(pod["spec"]).items():
                room[name] = room.get(name, Fraction(0)) - amount
    return room


def _free_ratio(node: Object, pods: list[Object]) -> Fraction:
    whole = value_of(node["status"]["allocatable"].get("cpu", "0"))
    return free_room(node, pods).get("cpu", Fraction(0)) / whole if whole else Fraction(0)


def _tolerates(spec: Object, taint: Object) -> bool:
    for toleration in spec.get("tolerations", ()):
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("operator", "Equal") == "Exists":
            if toleration.get("key") in (None, "", taint["key"]):
                return True
        elif toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


def _term(term: Object, node: Object) -> bool:
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not labels and not fields:
        return False
    named: dict[str, Any] = {"metadata": {"labels": {"metadata.name": node["metadata"]["name"]}}}
    return all(_rule(r, node) for r in labels) and all(_rule(r, named) for r in fields)


def _rule(rule: Object, holder: Object) -> bool:
    if rule["operator"] in ("Gt", "Lt"):
        text = holder["metadata"].get("labels", {}).get(rule["key"], "")
        if not text.lstrip("-").isdigit():
            return False
        given, bound = int(text), int(rule["values"][0])
        return given > bound if rule["operator"] == "Gt" else given < bound
    return by_labels(expression(rule))(holder)

"""Plays the Deployment and ReplicaSet controllers: pods, rolling and recreating, and status."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from support.kube.answers import Object
from support.kube.deletion import delete
from support.kube.registry import PLAYER, Registry
from support.kube.subresources import is_ready
from support.kube.writes import now_text, suffix

_HASH = "pod-template-hash"
_ENDED = ("Succeeded", "Failed")


def template_hash(deployment: Object) -> str:
    """Short hash of a Deployment's template."""
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def _percent(given: int | str, total: int, *, rounds_up: bool) -> int:
    if isinstance(given, int):
        return given
    exact = int(given.rstrip("%")) * total
    return -(-exact // 100) if rounds_up else exact // 100


class Workloads:
    """Deployments, their ReplicaSets and pods.

    Args:
        registry: the API.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def reconcile(self) -> None:
        """One pass over all Deployments and ReplicaSets."""
        registry = self._registry
        with registry.store.changed:
            for deployment in registry.list(registry.named("deployments"))[1]:
                if "deletionTimestamp" not in deployment["metadata"]:
                    self._deployment(deployment)
            for replica_set in registry.list(registry.named("replicasets"))[1]:
                if "deletionTimestamp" not in replica_set["metadata"]:
                    self._replica_set(replica_set)

    def _deployment(self, deployment: Object) -> None:
        spec, meta = deployment["spec"], deployment["metadata"]
        if spec.get("paused"):
            return
        mark = template_hash(deployment)
        owned = self._owned("replicasets", deployment)
        new = next((r for r in owned if r["metadata"]["labels"][_HASH] == mark), None)
        old = [r for r in owned if r is not new]
        sizes = self._sizes(spec, new, old)
        if new is None:
            new = self._make_set(deployment, mark, sizes[0])
        elif new["spec"]["replicas"] != sizes[0]:
            new = self._resize(new, sizes[0])
        old = [
            self._resize(r, n) if r["spec"]["replicas"] != n else r
            for r, n in zip(old, sizes[1:], strict=True)
        ]
        for spent in old:
            if not spent["spec"]["replicas"] and not self._owned("pods", spent):
                delete(
                    self._registry,
                    self._registry.named("replicasets"),
                    meta["namespace"],
                    spent["metadata"]["name"],
                    {},
                )
        self._tell(deployment, new, old)

    def _sizes(self, spec: Object, new: Object | None, old: list[Object]) -> list[int]:
        wanted = spec["replicas"]
        if spec["strategy"]["type"] == "Recreate":
            is_clear = not any(self._owned("pods", r) for r in old)
            return [wanted if is_clear else 0, *(0 for _ in old)]
        rolling = spec["strategy"]["rollingUpdate"]
        surge = _percent(rolling["maxSurge"], wanted, rounds_up=True)
        unavailable = _percent(rolling["maxUnavailable"], wanted, rounds_up=False)
        ready_new = 0 if new is None else sum(map(is_ready, self._alive(new)))
        ready_old = sum(is_ready(p) for r in old for p in self._alive(r))
        spare = ready_new + ready_old - (wanted - unavailable)
        sizes = []
        for replica_set in old:
            alive = self._alive(replica_set)
            unready = sum(not is_ready(p) for p in alive)
            gone = min(replica_set["spec"]["replicas"], unready + max(0, spare))
            spare -= max(0, gone - unready)
            sizes.append(replica_set["spec"]["replicas"] - gone)
        present = sum(r["spec"]["replicas"] for r in old)
        return [min(wanted, max(0, wanted + surge - present)), *sizes]

    def _make_set(self, deployment: Object, mark: str, size: int) -> Object:
        meta, spec = deployment["metadata"], deployment["spec"]
        labels = {**spec["template"]["metadata"]["labels"], _HASH: mark}
        template = {**spec["template"], "metadata": {**spec["template"]["metadata"], "labels": labels}}
        body = {
            "metadata": {
                "name": f"{meta['name']}-{mark}",
                "labels": labels,
                "ownerReferences": [_owner(deployment)],
            },
            "spec": {"replicas": size, "selector": {"matchLabels": labels}, "template": template},
        }
        return self._registry.create(self._registry.named("replicasets"), meta["namespace"], body, PLAYER)

    def _resize(self, replica_set: Object, size: int) -> Object:
        sets = self._registry.named("replicasets")
        return self._registry.modify(sets, replica_set, {"spec": {"replicas": size}})

    def _replica_set(self, replica_set: Object) -> None:
        meta, spec = replica_set["metadata"], replica_set["spec"]
        pods = self._registry.named("pods")
        alive = self._alive(replica_set)
        for _ in range(len(alive), spec["replicas"]):
            template = spec["template"]
            body = {
                "metadata": {
                    **template["metadata"],
                    "name": f"{meta['name']}-{suffix()}",
                    "ownerReferences": [_owner(replica_set)],
                },
                "spec": template["spec"],
            }
            self._registry.create(pods, meta["namespace"], body, PLAYER)
        victims = sorted(alive, key=lambda p: (bool(p["spec"].get("nodeName")), is_ready(p)))
        for pod in victims[: max(0, len(alive) - spec["replicas"])]:
            delete(self._registry, pods, meta["namespace"], pod["metadata"]["name"], {})
        self._write_status("replicasets", replica_set, _counts(self._alive(replica_set)))

    def _tell(self, deployment: Object, new: Object, old: list[Object]) -> None:
        fresh = self._alive(new)
        counts = _counts([*fresh, *(p for r in old for p in self._alive(r))])
        status = {**counts, "updatedReplicas": len(fresh)}
        wanted = deployment["spec"]["replicas"]
        if (missing := wanted - counts["availableReplicas"]) > 0:
            status["unavailableReplicas"] = missing
        truth = "True" if missing <= 0 else "False"
        present = deployment.get("status", {}).get("conditions", [])
        if not present or present[0]["status"] != truth:
            now = now_text()
            reason = "MinimumReplicasAvailable" if truth == "True" else "MinimumReplicasUnavailable"
            present = [
                {
                    "type": "Available",
                    "status": truth,
                    "reason": reason,
                    "lastTransitionTime": now,
                    "lastUpdateTime": now,
                }
            ]
        self._write_status("deployments", deployment, {**status, "conditions": present})

    def _write_status(self, plural: str, item: Object, status: Object) -> None:
        resource = self._registry.named(plural)
        status = {**status, "observedGeneration": item["metadata"]["generation"]}
        present = self._registry.get(resource, item["metadata"]["namespace"], item["metadata"]["name"])
        gone = {k: None for k in present.get("status", {}) if k not in status}
        self._registry.modify(resource, present, {"status": {**gone, **status}}, subresource="status")

    def _owned(self, plural: str, owner: Object) -> list[Object]:
        uid, namespace = owner["metadata"]["uid"], owner["metadata"]["namespace"]
        items = self._registry.list(self._registry.named(plural), namespace)[1]
        return [i for i in items if any(o["uid"] == uid for o in i["metadata"].get("ownerReferences") or ())]

    def _alive(self, replica_set: Object) -> list[Object]:
        return [
            p for p in self._owned("pods", replica_set)
            if "deletionTimestamp" not in p["metadata"] and p["status"].get("phase") not in _ENDED
        ]  # fmt: skip


def _owner(item: Object) -> Object:
    meta = item["metadata"]
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _counts(pods: Iterable[Object]) -> Object:
    listed = list(pods)
    ready = sum(is_ready(p) for p in listed)
    return {"replicas": len(listed), "readyReplicas": ready, "availableReplicas": ready}

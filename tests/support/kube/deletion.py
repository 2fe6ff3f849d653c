"""Deletion: preconditions, a pod's grace, finalizers; and the collector of what has lost its owners.

The collector is a thread of the fake, as the controller manager is beside the real server.
"""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

from support.kube.answers import Object, Refused, conflict, success
from support.kube.kinds import Resource
from support.kube.registry import Registry

_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"
_ENDED = ("Succeeded", "Failed")


def delete(registry: Registry, resource: Resource, namespace: str, name: str, options: Object) -> Object:
    """DELETE of one object.

    Args:
        registry: the API.
        resource: which.
        namespace: where.
        name: which one.
        options: `DeleteOptions`.

    Returns:
        The answer's body.
    """
    with registry.store.changed:
        item = registry.get(resource, namespace, name)
        _check(resource, item, options.get("preconditions") or {})
        grace_s = _grace(resource, item, options)
        finalizers = _finalizers(item, options.get("propagationPolicy", "Background"))
        if not grace_s and not finalizers and resource.plural != "namespaces":
            return _removed(registry, resource, item)
        return _marked(registry, resource, item, grace_s, finalizers)


def _check(resource: Resource, item: Object, wanted: Object) -> None:
    meta = item["metadata"]
    for key, what in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(key) and wanted[key] != meta[key]:
            why = (
                f"the {what} in the precondition ({wanted[key]}) does not match the {what} in record "
                f"({meta[key]}). "
                "The object might have been deleted and then recreated"
            )
            raise conflict(resource.group, resource.kind, meta["name"], why)


def _grace(resource: Resource, item: Object, options: Object) -> int:
    if resource.plural != "pods" or resource.is_custom:
        return 0
    if not item["spec"].get("nodeName") or item["status"].get("phase") in _ENDED:
        return 0
    wanted = options.get("gracePeriodSeconds")
    return int(item["spec"]["terminationGracePeriodSeconds"] if wanted is None else wanted)


def _finalizers(item: Object, policy: str) -> list[str]:
    finalizers = list(item["metadata"].get("finalizers", ()))
    added = {"Foreground": _FOREGROUND, "Orphan": _ORPHAN}.get(policy)
    return [*finalizers, added] if added and added not in finalizers else finalizers


def _removed(registry: Registry, resource: Resource, item: Object) -> Object:
    meta = item["metadata"]
    gone = registry.store.remove(resource, (meta.get("namespace", ""), meta["name"]))
    if resource.returns_deleted:
        return gone
    details = {"name": meta["name"], "kind": resource.plural, "uid": meta["uid"]}
    if resource.group:
        details["group"] = resource.group
    return success(details)


def _marked(
    registry: Registry, resource: Resource, item: Object, grace_s: int, finalizers: list[str]
) -> Object:
    meta = dict(item["metadata"])
    present = meta.get("deletionGracePeriodSeconds")
    if "deletionTimestamp" in meta and present is not None and present <= grace_s:
        return item  # a later deletion can only shorten it
    at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace_s)
    meta["deletionTimestamp"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    meta["deletionGracePeriodSeconds"] = grace_s
    if "generation" in meta and "deletionTimestamp" not in item["metadata"]:
        meta["generation"] += 1
    if finalizers:
        meta["finalizers"] = finalizers
    key = (meta.get("namespace", ""), meta["name"])
    item = {**item, "metadata": meta}
    if resource.plural == "namespaces":
        item["status"] = {"phase": "Terminating"}
    return registry.store.put(resource, key, item)


def confirm(registry: Registry, pod: Object) -> None:
    """What the kubelet does when a deleted pod's containers have ended."""
    meta = pod["metadata"]
    options: Object = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
    delete(registry, registry.named("pods"), meta["namespace"], meta["name"], options)


class Collector:
    """Deletes what lost its owners, in the background; empties namespaces; ends foreground deletions.

    Args:
        registry: the API.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="fake-collector", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        with self._registry.store.changed:
            self._is_over = True
            self._registry.store.changed.notify_all()
        self._thread.join(5)

    def _run(self) -> None:
        store = self._registry.store
        seen = -1
        while True:
            with store.changed:
                if store.version == seen and not self._is_over:
                    store.changed.wait(timeout=5)
                if self._is_over:
                    return
                seen = store.version
                self.collect()

    def collect(self) -> None:
        """One pass over everything."""
        registry = self._registry
        by_key = {r.key: r for r in registry.resources()}
        every = [(by_key[key], item) for key, item in registry.store.every()]
        alive = {item["metadata"]["uid"]: item for _, item in every}
        for resource, item in every:
            owners = item["metadata"].get("ownerReferences") or []
            if owners and not any(_owns(alive.get(o["uid"]), item) for o in owners):
                self._delete(resource, item, {})
        self._finish(every)

    def _finish(self, every: list[tuple[Resource, Object]]) -> None:
        definitions = {
            (i["spec"]["group"], i["spec"]["names"]["plural"])
            for r, i in every
            if r.plural == "customresourcedefinitions"
        }
        namespaces = {i["metadata"]["name"]: i for r, i in every if r.plural == "namespaces"}
        used = {i["metadata"].get("namespace") for _, i in every}
        for name, item in namespaces.items():
            if "deletionTimestamp" in item["metadata"] and name not in used:
                self._registry.store.remove(self._registry.named("namespaces"), ("", name))
        for resource, item in every:
            meta = item["metadata"]
            if resource.is_namespaced and "deletionTimestamp" in namespaces.get(meta["namespace"], {}).get(
                "metadata", {}
            ):
                self._delete(resource, item, {})
            if resource.is_custom and resource.key not in definitions:
                self._delete(resource, item, {})
            for finalizer in (_FOREGROUND, _ORPHAN):
                if "deletionTimestamp" in meta and finalizer in meta.get("finalizers", ()):
                    self._settle(resource, item, finalizer, every)

    def _settle(
        self, resource: Resource, item: Object, finalizer: str, every: list[tuple[Resource, Object]]
    ) -> None:
        registry, uid = self._registry, item["metadata"]["uid"]
        dependents = [
            (r, i) for r, i in every
            if any(o["uid"] == uid for o in i["metadata"].get("ownerReferences") or ())
        ]  # fmt: skip
        for of, dependent in dependents:
            if finalizer == _ORPHAN:
                owners = [o for o in dependent["metadata"]["ownerReferences"] if o["uid"] != uid]
                registry.modify(of, dependent, {"metadata": {"ownerReferences": owners}})
            elif "deletionTimestamp" not in dependent["metadata"]:
                self._delete(of, dependent, {})
        if finalizer == _ORPHAN or not dependents:
            left = [f for f in item["metadata"]["finalizers"] if f != finalizer]
            registry.modify(resource, item, {"metadata": {"finalizers": left or None}})

    def _delete(self, resource: Resource, item: Object, options: dict[str, Any]) -> None:
        meta = item["metadata"]
        if "deletionTimestamp" in meta:
            return
        options = {**options, "preconditions": {"uid": meta["uid"]}}
        try:
            delete(self._registry, resource, meta.get("namespace", ""), meta["name"], options)
        except Refused as refused:
            if refused.code not in (404, 409):  # it went, or was made anew, in between
                raise


def _owns(owner: Object | None, item: Object) -> bool:
    if owner is None:
        return False
    namespace = owner["metadata"].get("namespace")
    return namespace is None or namespace == item["metadata"].get("namespace")


__all__ = ["Collector", "confirm", "delete"]

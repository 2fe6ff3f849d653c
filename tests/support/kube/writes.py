"""One write, from a candidate to a stored object: status apart, defaults, rules, generation, owners.

Between `registry` (verbs) and `store`. It decides nothing about verbs and answers.
"""

from __future__ import annotations

import copy
import datetime as dt
import random
import uuid
from fractions import Fraction
from typing import Any

from support.kube.answers import Cause, Object, bad_request, conflict, forbidden, invalid, modified
from support.kube.defaults import FILLERS, admit, qos_class
from support.kube.kinds import Resource
from support.kube.metadata_rules import metadata_faults
from support.kube.ownership import Owned, Writer, after_update, owned_of, with_owned
from support.kube.quantities import value_of
from support.kube.rules import FAULTS, resize_faults
from support.kube.schema import Typed
from support.kube.store import Store

_KEPT = (
    "name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
    "generation", "managedFields", "generateName",
)  # fmt: skip
"""Metadata that a write cannot change."""


def now_text() -> str:
    """The time as the server writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def suffix() -> str:
    """Five random characters, as in generated names."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def decoded(resource: Resource, body: Any, namespace: str) -> Object:
    """A body as an object of this resource: types are right, unknown fields are gone.

    Raises:
        Refused: it is of another kind, of another namespace, or its types are wrong (built-in kinds).
    """
    if not isinstance(body, dict):
        raise bad_request("the object provided is unrecognized (must be of type object)")
    for field, name in (("kind", "Kind"), ("apiVersion", "apiVersion")):
        if resource.is_custom and not body.get(field):
            raise bad_request(
                f"the object provided is unrecognized (must be of type {resource.kind}): "
                f"Object '{name}' is missing"
            )
    body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
    if (body["apiVersion"], body["kind"]) != (resource.api_version, resource.kind):
        raise bad_request(
            f"the API version in the data ({body['apiVersion']}, kind {body['kind']}) does not match the "
            f"expected API version ({resource.api_version}, kind {resource.kind})"
        )
    item: Object = resource.typed.prune(body)
    meta = item.setdefault("metadata", {})
    if resource.is_namespaced:
        if meta.setdefault("namespace", namespace) != namespace:
            raise bad_request(
                f"the namespace of the provided object does not match the namespace sent on the request: "
                f"{meta['namespace']} is not {namespace}"
            )
    else:
        meta.pop("namespace", None)
    if not resource.is_custom and (faults := _type_faults(resource.typed, item)):
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"json: cannot unmarshal: {faults[0].line()}"
        )
    return item


def _type_faults(typed: Typed, item: Object) -> list[Cause]:
    return [f for f in typed.faults(item) if f.reason == "FieldValueTypeInvalid"]


class Writes:
    """Brings objects into the store.

    Args:
        store: where they go.
        nodes: the resource of nodes.
    """

    def __init__(self, store: Store, nodes: Resource) -> None:
        self._store = store
        self._nodes = nodes
        self._addresses = 10

    def create(self, resource: Resource, item: Object, owned: Owned | None, writer: Writer) -> Object:
        """A new object."""
        meta = item["metadata"]
        for key in (*_KEPT[2:8], "resourceVersion"):
            meta.pop(key, None)
        if not meta.get("name") and (prefix := meta.get("generateName")):
            meta["name"] = prefix + suffix()
        if resource.has_status:
            item.pop("status", None)
        self._fill(resource, item, None)
        self._check(resource, item, None, "")
        meta["uid"] = str(uuid.uuid4())
        meta["creationTimestamp"] = now_text()
        if resource.has_generation:
            meta["generation"] = 1
        if resource.plural == "pods" and not resource.is_custom:
            item["status"] = {"phase": "Pending", "qosClass": qos_class(item["spec"])}
        elif resource.has_status and not resource.is_custom:
            item.setdefault("status", {"loadBalancer": {}} if resource.plural == "services" else {})
        if owned is None:
            bare = {k: v for k, v in item.items() if k != "status"} if resource.has_status else item
            owned = after_update(None, bare, resource.typed, writer)
        with_owned(item, owned, None, resource.api_version, meta["creationTimestamp"])
        if resource.plural == "pods" and not resource.is_custom:
            admit(item["spec"])
        return self._store.put(resource, (meta.get("namespace", ""), meta["name"]), item)

    def update(
        self,
        resource: Resource,
        before: Object,
        item: Object,
        writer: Writer,
        *,
        owned: Owned | None = None,
        is_put: bool = False,
    ) -> Object:
        """Another state of an object; nothing is written where nothing changes."""
        name = before["metadata"]["name"]
        self._preconditions(resource, before, item, is_put=is_put)
        item = self._separated(resource, before, copy.deepcopy(item), writer.subresource)
        item = resource.typed.prune(item)
        self._fill(resource, item, before)
        self._check(resource, item, before, writer.subresource)
        meta = item["metadata"]
        is_bound = writer.subresource == "binding"  # the one change of a spec that does not count
        if resource.has_generation and not is_bound and _spec(item) != _spec(before):
            meta["generation"] = before["metadata"].get("generation", 0) + 1
        if owned is None:
            owned = after_update(before, item, resource.typed, writer)
        with_owned(item, owned, before, resource.api_version, now_text())
        meta["resourceVersion"] = before["metadata"]["resourceVersion"]
        if _without_managers(item) == _without_managers(before) and owned_of(item) == owned_of(before):
            return before
        key = (meta.get("namespace", ""), name)
        if "deletionTimestamp" in meta and not meta.get("finalizers") and _is_over(resource, meta):
            self._store.put(resource, key, item)
            return self._store.remove(resource, key)
        return self._store.put(resource, key, item)

    def _preconditions(self, resource: Resource, before: Object, item: Object, *, is_put: bool) -> None:
        given, present = item["metadata"], before["metadata"]
        if given.get("name", present["name"]) != present["name"]:
            raise bad_request(
                f"the name of the object ({given['name']}) does not match the name on the URL "
                f"({present['name']})"
            )
        uid, version = given.get("uid"), given.get("resourceVersion")
        if uid and uid != present["uid"]:
            if is_put:
                why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {present['uid']}"
                raise conflict(resource.group, resource.plural, present["name"], why)
            cause = Cause("FieldValueInvalid", f'Invalid value: "{uid}": field is immutable', "metadata.uid")
            raise invalid(resource.group, resource.kind, present["name"], [cause])
        if is_put and not version and not resource.is_unconditional:
            cause = Cause(
                "FieldValueInvalid",
                "Invalid value: 0: must be specified for an update",
                "metadata.resourceVersion",
            )
            raise invalid(resource.group, resource.kind, present["name"], [cause])
        if version and version != present["resourceVersion"]:
            raise modified(resource.group, resource.plural, present["name"])

    def _separated(self, resource: Resource, before: Object, item: Object, subresource: str) -> Object:
        meta = item["metadata"]
        for key in _KEPT:
            meta.pop(key, None)
            if key in before["metadata"]:
                meta[key] = copy.deepcopy(before["metadata"][key])
        if subresource in ("status", "resize", "binding"):
            result = copy.deepcopy(before)
            if subresource == "status":
                result.pop("status", None)
                if "status" in item:
                    result["status"] = item["status"]
                if not resource.is_custom:
                    for key in (
                        ("annotations",) if resource.plural == "deployments" else ("annotations", "labels")
                    ):
                        result["metadata"].pop(key, None)
                        if key in meta:
                            result["metadata"][key] = meta[key]
            else:
                result["spec"] = item["spec"]
                if subresource == "binding":
                    result["status"] = item["status"]
            return result
        if resource.has_status:
            item.pop("status", None)
            if "status" in before:
                item["status"] = copy.deepcopy(before["status"])
        return item

    def _fill(self, resource: Resource, item: Object, before: Object | None) -> None:
        if resource.is_custom:
            resource.typed.fill(item)
        if resource.plural in FILLERS and not resource.is_custom:
            if resource.plural in ("pods", "services", "deployments", "replicasets"):
                item.setdefault("spec", {})
            FILLERS[resource.plural](item)
        if resource.plural == "services" and not resource.is_custom:
            self._address(item["spec"], before)

    def _address(self, spec: Object, before: Object | None) -> None:
        if "clusterIP" not in spec:
            if before is not None:
                spec["clusterIP"] = before["spec"]["clusterIP"]
            else:
                self._addresses += 1
                spec["clusterIP"] = f"10.96.{self._addresses // 250}.{self._addresses % 250}"
        spec["clusterIPs"] = [spec["clusterIP"]]

    def _check_room(self, resource: Resource, pod: Object) -> None:
        """A resize beyond what the whole node has is refused at once."""
        node = self._store.get(self._nodes, ("", pod["spec"].get("nodeName", "")))
        if node is None:
            return
        room = node.get("status", {}).get("allocatable", {})
        short = []
        for name, unit in (("cpu", 1000), ("memory", 1)):
            wanted, has = _requested(pod["spec"], name) * unit, value_of(room.get(name, "0")) * unit
            if wanted > has:
                short.append(f"{name}, requested: {int(wanted)}, allocatable: {int(has)}")
        if short:
            why = f"node didn't have enough allocatable resources: {'; '.join(short)}"
            raise forbidden(resource.group, resource.plural, pod["metadata"]["name"], why)

    def _check(self, resource: Resource, item: Object, before: Object | None, subresource: str) -> None:
        found = resource.typed.faults(item)
        if resource.name_rules is not None:
            found += resource.name_rules.faults(item["metadata"], "metadata")
        found += metadata_faults(item, resource)
        if not found and not resource.is_custom:
            if subresource == "resize" and before is not None:
                self._check_room(resource, item)
                found += resize_faults(item, before)
            elif subresource == "" and resource.plural in FAULTS:
                found += FAULTS[resource.plural](item, before)
        if found:
            name = item["metadata"].get("name", "")
            raise invalid(resource.group, resource.kind, name, found)


def _requested(spec: Object, name: str) -> Fraction:
    texts = [c.get("resources", {}).get("requests", {}).get(name, "0") for c in spec["containers"]]
    return sum((value_of(text) for text in texts), Fraction(0))


def _is_over(resource: Resource, meta: Object) -> bool:
    return resource.plural != "pods" or not meta.get("deletionGracePeriodSeconds")


def _spec(item: Object) -> Object:
    return {k: v for k, v in item.items() if k not in ("metadata", "status", "apiVersion", "kind")}


def _without_managers(item: Object) -> Object:
    meta = {k: v for k, v in item["metadata"].items() if k not in ("managedFields", "resourceVersion")}
    return {**item, "metadata": meta}

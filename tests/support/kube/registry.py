"""The verbs of the API over all resources: create, get, list, replace, patch, apply.

Between the HTTP face (or a test that plays a node) and `writes`. Deletion is in `deletion`, subresources with
an object of their own in `subresources`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import yaml
from support.kube.answers import (
    Cause,
    Object,
    Refused,
    bad_request,
    conflict,
    exists,
    forbidden,
    invalid,
    no_resource,
    not_found,
    unsupported,
)
from support.kube.kinds import Resource, builtin_resources, custom_resource
from support.kube.ownership import Writer, applied
from support.kube.patches import json_patch, merge, strategic
from support.kube.selectors import by_fields, by_labels
from support.kube.store import Store
from support.kube.writes import Writes, decoded

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
PLAYER = "fake"
"""Manager of what the fake's own players write."""


class Registry:
    """All resources of one API server."""

    def __init__(self) -> None:
        self.store = Store()
        self._resources: dict[tuple[str, str, str], Resource] = {}
        for resource in builtin_resources():
            self._serve(resource)
        self._writes = Writes(self.store, self.named("nodes"))
        for name in ("default", "kube-system"):
            self.create(self.named("namespaces"), "", {"metadata": {"name": name}}, PLAYER)

    def _serve(self, resource: Resource) -> None:
        self._resources[resource.group, resource.version, resource.plural] = resource

    def resources(self) -> list[Resource]:
        """All that are served."""
        return list(self._resources.values())

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """One resource.

        Raises:
            Refused: 404.
        """
        try:
            return self._resources[group, version, plural]
        except KeyError:
            raise no_resource() from None

    def named(self, plural: str) -> Resource:
        """The resource of that plural name, whatever its group."""
        return next(r for r in self._resources.values() if r.plural == plural)

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        """The resource of an owner reference."""
        found = (r for r in self._resources.values() if (r.api_version, r.kind) == (api_version, kind))
        return next(found, None)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object; not to be changed."""
        found = self.store.get(resource, (namespace, name))
        if found is None:
            raise not_found(resource.group, resource.plural, name)
        return found

    def list(
        self, resource: Resource, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[int, list[Object]]:
        """Version and objects that match."""
        by_label, by_field = by_labels(labels), by_fields(fields, resource)
        version, items = self.store.all(resource, namespace)
        return version, [item for item in items if by_label(item) and by_field(item)]

    def create(self, resource: Resource, namespace: str, body: Any, manager: str) -> Object:
        """Makes an object."""
        with self.store.changed:
            item = decoded(resource, body, namespace)
            if item["metadata"].get("resourceVersion"):
                raise bad_request("resourceVersion should not be set on objects to be created")
            return self._created(resource, namespace, item, Writer(manager, "Update"), None)

    def _created(
        self, resource: Resource, namespace: str, item: Object, writer: Writer, owned: Any
    ) -> Object:
        name = item["metadata"].get("name", "")
        if resource.is_namespaced:
            self._check_namespace(resource, namespace, name)
        if name and self.store.get(resource, (namespace, name)) is not None:
            raise exists(resource.group, resource.plural, name)
        made = self._writes.create(resource, item, owned, writer)
        if resource.plural == "customresourcedefinitions":
            self._serve(custom_resource(made))
        if resource.plural == "namespaces":
            accounts = self.named("serviceaccounts")
            self._created(accounts, made["metadata"]["name"], decoded(
                accounts, {"metadata": {"name": "default"}}, made["metadata"]["name"]
            ), writer, None)  # fmt: skip
        return made

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.store.get(self.named("namespaces"), ("", namespace))
        if found is None:
            raise not_found("", "namespaces", namespace)
        if "deletionTimestamp" in found["metadata"]:
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(resource.group, resource.plural, name, why)

    def replace(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        manager: str,
        subresource: str = "",
        *,
        on_create: Callable[[], None] = lambda: None,
    ) -> tuple[Object, bool]:
        """PUT; also says whether the object is new, which some kinds allow."""
        with self.store.changed:
            item = decoded(resource, body, namespace)
            is_new = self.store.get(resource, (namespace, name)) is None
            if is_new and resource.is_made_by_put and not subresource:
                on_create()
                return self.create(resource, namespace, item, manager), True
            before = self.get(resource, namespace, name)
            writer = Writer(manager, "Update", subresource)
            return self._updated(resource, before, item, writer, is_put=True), False

    def _updated(
        self, resource: Resource, before: Object, item: Object, writer: Writer, *, is_put: bool = False
    ) -> Object:
        made = self._writes.update(resource, before, item, writer, is_put=is_put)
        if resource.plural == "customresourcedefinitions" and made is not before:
            self._serve(custom_resource(made))
        return made

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        raw: bytes,
        content: str,
        manager: str,
        *,
        force: bool = False,
        subresource: str = "",
        on_create: Callable[[], None] = lambda: None,
    ) -> tuple[Object, bool]:
        """PATCH of any sort; also says whether the object is new.

        `on_create` may still refuse one that an apply would make.
        """
        body = _read(raw, content)
        with self.store.changed:
            if content == APPLY:
                if not subresource and self.store.get(resource, (namespace, name)) is None:
                    on_create()
                return self._apply(
                    resource, namespace, name, body, manager, force=force, subresource=subresource
                )
            before = self.get(resource, namespace, name)
            candidate = patched(resource, before, body, content)
            candidate = decoded(resource, candidate, namespace)
            return self._updated(resource, before, candidate, Writer(manager, "Update", subresource)), False

    def modify(
        self,
        resource: Resource,
        item: Object,
        changes: Object,
        *,
        subresource: str = "",
        manager: str = PLAYER,
    ) -> Object:
        """A player's merge patch of an object as it is now."""
        meta = item["metadata"]
        raw = json.dumps(changes).encode()
        namespace = meta.get("namespace", "")
        return self.patch(resource, namespace, meta["name"], raw, MERGE, manager, subresource=subresource)[0]

    def _apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        manager: str,
        *,
        force: bool,
        subresource: str,
    ) -> tuple[Object, bool]:
        if not manager:
            cause = Cause("FieldValueRequired", "Required value: is required for apply patch", "fieldManager")
            raise invalid("meta.k8s.io", "PatchOptions", "", [cause])
        for field in ("apiVersion", "kind"):
            if not isinstance(body, dict) or not body.get(field):
                raise bad_request(f"{field} must be set in an apply patch")
        if body.get("metadata", {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        item = decoded(resource, body, namespace)
        meta = item["metadata"]
        if meta.setdefault("name", name) != name:
            raise bad_request(
                f"the name of the object ({meta['name']}) does not match the name on the URL ({name})"
            )
        writer = Writer(manager, "Apply", subresource)
        before = self.store.get(resource, (namespace, name))
        if before is None and (subresource or meta.get("uid")):
            if not subresource:
                why = (
                    f"uid mismatch: the provided object specified uid {meta['uid']}, "
                    "and no existing object was found"
                )
                raise conflict(resource.group, resource.plural, name, why)
            raise not_found(resource.group, resource.plural, name)
        ignored = _ignored(resource, subresource)
        if before is None:
            live: Object = {k: item[k] for k in ("apiVersion", "kind")}
            live["metadata"] = {k: v for k, v in meta.items() if k in ("name", "namespace")}
            made, owned = applied(live, item, resource.typed, writer, force=force, ignored=ignored)
            return self._created(resource, namespace, made, writer, owned), True
        made, owned = applied(before, item, resource.typed, writer, force=force, ignored=ignored)
        for key in ("resourceVersion", "uid"):
            if meta.get(key):
                made["metadata"][key] = meta[key]
        return self._writes.update(resource, before, made, writer, owned=owned), False


def _ignored(resource: Resource, subresource: str) -> tuple[str, ...]:
    if subresource == "status":
        return ("spec", "metadata") if resource.is_custom else ("spec",)
    if subresource == "resize":
        return ("status", "metadata")
    return ("status",) if resource.has_status else ()


def _read(raw: bytes, content: str) -> Any:
    try:
        return yaml.safe_load(raw) if content == APPLY else json.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise bad_request(f"error decoding patch: {error}") from error


def patched(resource: Resource, before: Object, body: Any, content: str) -> Object:
    """The object with a patch laid over it.

    Raises:
        Refused: it does not fit, or this resource takes no such patch.
    """
    target = copy.deepcopy(before)
    if content == JSON:
        result = json_patch(target, body)
    elif not isinstance(body, dict):
        raise bad_request("json: cannot unmarshal into Go value of type map[string]interface {}")
    elif content == MERGE:
        result = merge(target, body)
    elif content == STRATEGIC and not resource.is_custom:
        result = strategic(target, body, resource.typed)
    else:
        raise unsupported(content)
    if not isinstance(result, dict):
        raise bad_request("the patch leaves no object")
    return result


__all__ = ["APPLY", "JSON", "MERGE", "PLAYER", "STRATEGIC", "Refused", "Registry", "patched"]

"""From an authorized request to an answer: one function a verb.

Between the HTTP face and registry, deletion, subresources.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

from support.kube.access import Access, Asked
from support.kube.answers import Object, Refused, bad_request, method_not_allowed, no_resource
from support.kube.deletion import delete
from support.kube.forms import list_of
from support.kube.kinds import Resource
from support.kube.metrics import Metrics
from support.kube.pod_logs import PodLogs
from support.kube.registry import Registry
from support.kube.requests import Asking
from support.kube.subresources import bind, evict, get_scale, put_scale

Answer = tuple[int, Object | bytes]
REVIEWS = ("selfsubjectreviews", "selfsubjectaccessreviews")
"""What everybody may ask about himself."""
_NEVER = "2999-01-01T00:00:00Z"
MAX_BODY_BYTES = 3 * 1024 * 1024


class Routing:
    """Everything but watches.

    Args:
        registry: the API.
        access: who may do what (for access reviews).
        logs: output of pods.
        metrics: use of pods.
    """

    def __init__(self, registry: Registry, access: Access, logs: PodLogs, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics
        self._access = access
        self._logs = logs

    def answer(self, asking: Asking, user: str, raw: bytes, content: str, agent: str) -> Answer:
        """Status and body.

        Raises:
            Refused: anything else than success.
        """
        if asking.plural in REVIEWS:
            return 201, self._review(asking, user, _decoded(raw))
        if self._metrics.is_asked(asking):
            return 200, self._metrics.answer(asking)
        if asking.query.get("dryRun"):
            raise bad_request("dryRun is not supported here")
        resource = self._registry.resource(asking.group, asking.version, asking.plural)
        manager = asking.query.get("fieldManager") or agent.partition("/")[0][:128] or "unknown"
        if asking.subresource and asking.subresource not in resource.subresources:
            raise no_resource()
        if asking.subresource in ("log", "binding", "eviction", "scale", "token"):
            return self._special(resource, asking, raw, content, manager)
        return self._plain(resource, asking, raw, content, manager, user)

    def _plain(
        self, resource: Resource, asking: Asking, raw: bytes, content: str, manager: str, user: str
    ) -> Answer:
        match asking.verb:
            case "get":
                return 200, self._registry.get(resource, self._where(resource, asking), asking.name)
            case "list":
                return 200, self._list(resource, asking)
            case "create" if not asking.name:
                self._need_namespace(resource, asking)
                return 201, self._registry.create(resource, asking.namespace, _decoded(raw), manager)
            case "update" | "patch" as verb:
                made, is_new = self._written(verb, resource, asking, raw, content, manager, user)
                return (201 if is_new else 200), made
            case "delete":
                where = self._where(resource, asking)
                return 200, delete(self._registry, resource, where, asking.name, _options(asking, raw))
            case "deletecollection":
                return 200, self._delete_all(resource, asking, raw)
            case _:
                raise method_not_allowed()

    def _written(
        self, verb: str, resource: Resource, asking: Asking, raw: bytes, content: str, manager: str, user: str
    ) -> tuple[Object, bool]:
        where = self._where(resource, asking)
        create = dataclasses.replace(asking.asked(), verb="create")

        def on_create() -> None:
            self._access.check(user, create)

        if verb == "update":
            return self._registry.replace(
                resource,
                where,
                asking.name,
                _decoded(raw),
                manager,
                asking.subresource,
                on_create=on_create,
            )
        return self._registry.patch(
            resource,
            where,
            asking.name,
            raw,
            content,
            asking.query.get("fieldManager", "") if "apply" in content else manager,
            force=asking.is_on("force"),
            subresource=asking.subresource,
            on_create=on_create,
        )

    def _where(self, resource: Resource, asking: Asking) -> str:
        self._need_namespace(resource, asking)
        return asking.namespace if resource.is_namespaced else ""

    def _need_namespace(self, resource: Resource, asking: Asking) -> None:
        if resource.is_namespaced and not asking.namespace:
            raise method_not_allowed() if asking.verb == "create" else no_resource()

    def _list(self, resource: Resource, asking: Asking) -> Object:
        namespace = asking.namespace if resource.is_namespaced else ""
        query = asking.query
        version, items = self._registry.list(
            resource, namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        meta: Object = {"resourceVersion": str(version)}
        start = 0
        if token := query.get("continue"):
            start, version = _continued(token)
            meta["resourceVersion"] = str(version)
        most = int(query.get("limit") or 0) or len(items)
        rest = len(items) - start - most
        if rest > 0:
            meta["continue"] = base64.b64encode(json.dumps([start + most, version]).encode()).decode()
            meta["remainingItemCount"] = rest
        items = items[start : start + most]
        return list_of(resource, items, meta)

    def _delete_all(self, resource: Resource, asking: Asking, raw: bytes) -> Object:
        with self._registry.store.changed:
            found = self._list(resource, asking)
            for item in found["items"]:
                meta = item["metadata"]
                delete(
                    self._registry, resource, meta.get("namespace", ""), meta["name"], _options(asking, raw)
                )
            return found

    def _special(self, resource: Resource, asking: Asking, raw: bytes, content: str, manager: str) -> Answer:
        registry, namespace, name = self._registry, asking.namespace, asking.name
        match asking.subresource, asking.verb:
            case "log", "get":
                return 200, self._logs.read(registry.get(resource, namespace, name), asking.query)
            case "token", "create":
                registry.get(resource, namespace, name)
                token = self._access.token(name, namespace)
                return 201, {**_decoded(raw), "status": {"token": token, "expirationTimestamp": _NEVER}}
            case "scale", "get":
                return 200, get_scale(registry, resource, namespace, name)
            case "scale", ("update" | "patch") as verb:
                kind = content if verb == "patch" else ""
                return 200, put_scale(registry, resource, namespace, name, _decoded(raw), kind, manager)
            case "binding", "create":
                return 201, bind(registry, namespace, name, _decoded(raw), manager)
            case "eviction", "create":
                return 201, evict(registry, namespace, name, _decoded(raw))
            case _:
                raise method_not_allowed()

    def _review(self, asking: Asking, user: str, body: Any) -> Object:
        if asking.plural == "selfsubjectreviews":
            return {**body, "status": {"userInfo": {"username": user}}}
        wanted = body["spec"].get("resourceAttributes") or {}
        resource = wanted.get("resource", "") + (f"/{s}" if (s := wanted.get("subresource")) else "")
        asked = Asked(
            wanted.get("verb", ""),
            wanted.get("group", ""),
            resource,
            wanted.get("namespace", ""),
            wanted.get("name", ""),
        )
        return {**body, "status": {"allowed": self._access.may(user, asked)}}


def _continued(token: str) -> tuple[int, int]:
    try:
        start, version = json.loads(base64.b64decode(token))
    except ValueError:
        raise bad_request(f"continue key is not valid: {token}") from None
    return start, version


def _decoded(raw: bytes) -> Any:
    if len(raw) > MAX_BODY_BYTES:
        raise Refused(413, "RequestEntityTooLarge", f"Request entity too large: limit is {MAX_BODY_BYTES}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from error


def _options(asking: Asking, raw: bytes) -> Object:
    options = dict(_decoded(raw)) if raw else {}
    for key in ("propagationPolicy", "gracePeriodSeconds"):
        if key in asking.query:
            options[key] = int(asking.query[key]) if key == "gracePeriodSeconds" else asking.query[key]
    return options

"""A request's path and query as the API server understands them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from support.kube.access import Asked
from support.kube.answers import no_resource


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """What a request is about. `plural` is empty where it is about no resource (`path` says what)."""

    path: str
    query: Mapping[str, str]
    group: str = ""
    version: str = ""
    namespace: str = ""
    plural: str = ""
    name: str = ""
    subresource: str = ""
    verb: str = ""

    def asked(self) -> Asked:
        """For the authorizer."""
        if not self.plural:
            return Asked(self.verb, path=self.path)
        resource = self.plural + (f"/{self.subresource}" if self.subresource else "")
        namespace = "" if self.plural == "namespaces" and not self.namespace else self.namespace
        return Asked(self.verb, self.group, resource, namespace, self.name)

    def is_on(self, option: str) -> bool:
        """A boolean of the query."""
        return self.query.get(option, "").lower() in ("1", "true")


def read(method: str, target: str) -> Asking:
    """Takes a request's line apart.

    Raises:
        Refused: 404, the path can mean nothing.
    """
    split = urlsplit(target)
    path = split.path.rstrip("/") or "/"
    query = dict(parse_qsl(split.query, keep_blank_values=True))
    parts = [unquote(p) for p in path.split("/")[1:]]
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return Asking(path, query, verb=method.lower())
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    elif rest[0] == "namespaces" and len(rest) > 1:
        namespace = rest[1]
    plural, name, subresource, *more = [*rest, "", ""][: max(3, len(rest))]
    if more:
        raise no_resource()
    verb = _verb(method, name, query)
    if verb in ("list", "watch", "deletecollection"):
        name = _named(query.get("fieldSelector", ""))
    return Asking(path, query, group, version, namespace, plural, name, subresource, verb)


def _verb(method: str, name: str, query: Mapping[str, str]) -> str:
    if method == "GET":
        if query.get("watch", "").lower() in ("1", "true"):
            return "watch"
        return "get" if name else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


def _named(fields: str) -> str:
    for part in fields.split(","):
        key, _, value = part.replace("==", "=").partition("=")
        if key.strip() == "metadata.name" and "!" not in key:
            return value.strip()
    return ""

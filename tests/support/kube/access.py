"""Who may do what: tokens of service accounts, roles and bindings as they stand in the API.

`Access.check` answers as the real authorizer (RBAC) does; every grant that allowed something is noted, so
that a test can say which granted verbs nobody needs.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

from support.kube.answers import Object, Refused, forbidden, unauthorized
from support.kube.registry import Registry

ADMIN = "fake-admin-token"
"""Token of one who may do everything."""
ADMIN_USER = "system:admin"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One thing that somebody wants to do. `resource` has its subresource: `pods/log`; empty with `path`."""

    verb: str
    group: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One verb on one resource that a role gives. `role` is `Kind/namespace/name`."""

    role: str
    group: str
    resource: str
    verb: str
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Denial:
    """Something that was refused."""

    user: str
    asked: Asked


class Access:
    """Authentication and authorization.

    Args:
        registry: where roles and bindings are.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._users: dict[str, str] = {ADMIN: ADMIN_USER}
        self._used: dict[str, set[Grant]] = {}
        self._denied: list[Denial] = []

    def token(self, service_account: str, namespace: str) -> str:
        """A token for a service account, which needs not exist."""
        token = f"token-of-{namespace}-{service_account}"
        with self._lock:
            self._users[token] = f"system:serviceaccount:{namespace}:{service_account}"
        return token

    def revoke(self, token: str) -> None:
        """The token is nobody's from now on."""
        with self._lock:
            self._users.pop(token, None)

    def user(self, authorization: str) -> str:
        """Whose a bearer token is.

        Raises:
            Refused: 401.
        """
        if not authorization:
            return "system:anonymous"
        with self._lock:
            found = self._users.get(authorization.removeprefix("Bearer ").strip())
        if found is None:
            raise unauthorized()
        return found

    def check(self, user: str, asked: Asked) -> None:
        """Lets pass or refuses.

        Raises:
            Refused: 403.
        """
        if user == ADMIN_USER or self.is_allowed(user, asked):
            return
        with self._lock:
            self._denied.append(Denial(user, asked))
        raise _denial(user, asked)

    def may(self, user: str, asked: Asked) -> bool:
        """Whether it would be allowed; nothing is noted."""
        return user == ADMIN_USER or any(_covers(g, asked) for g in self._grants(user, asked.namespace))

    def is_allowed(self, user: str, asked: Asked) -> bool:
        """Whether some role allows it; notes which grant did."""
        if asked.path:
            return asked.path in ("/version", "/healthz", "/livez", "/readyz") or (
                asked.path in ("/api", "/apis") or asked.path.startswith(("/api/", "/apis/"))
            )
        for grant in self._grants(user, asked.namespace):
            if _covers(grant, asked):
                with self._lock:
                    self._used.setdefault(user, set()).add(grant)
                return True
        return False

    def denied(self) -> list[Denial]:
        """What was refused so far."""
        with self._lock:
            return list(self._denied)

    def granted(self, service_account: str, namespace: str) -> set[Grant]:
        """All that a service account may do, in any namespace."""
        return set(self._grants(f"system:serviceaccount:{namespace}:{service_account}", None))

    def unused(self, service_account: str, namespace: str) -> set[Grant]:
        """Of that, what nothing needed so far."""
        user = f"system:serviceaccount:{namespace}:{service_account}"
        with self._lock:
            used = set(self._used.get(user, ()))
        return self.granted(service_account, namespace) - used

    def _grants(self, user: str, namespace: str | None) -> Iterator[Grant]:
        """The narrowest first, so that a wide one is not noted for what a narrow one allows."""
        registry = self._registry
        for binding in registry.list(registry.named("rolebindings"), namespace or "")[1]:
            if namespace == "":
                break  # a role does not reach what has no namespace, nor all of them
            if _binds(binding, user):
                yield from self._rules(binding, binding["metadata"]["namespace"])
        for binding in registry.list(registry.named("clusterrolebindings"))[1]:
            if _binds(binding, user):
                yield from self._rules(binding, "")

    def _rules(self, binding: Object, namespace: str) -> Iterator[Grant]:
        ref = binding["roleRef"]
        is_cluster = ref["kind"] == "ClusterRole"
        resource = self._registry.named("clusterroles" if is_cluster else "roles")
        role = self._registry.store.get(resource, ("" if is_cluster else namespace, ref["name"]))
        for rule in (role or {}).get("rules") or ():
            for group in rule.get("apiGroups") or ():
                for name in rule.get("resources") or ():
                    for verb in rule["verbs"]:
                        label = f"{ref['kind']}/{namespace}/{ref['name']}"
                        yield Grant(label, group, name, verb, tuple(rule.get("resourceNames") or ()))


def _binds(binding: Object, user: str) -> bool:
    for subject in binding.get("subjects") or ():
        if subject["kind"] == "ServiceAccount":
            namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
            if user == f"system:serviceaccount:{namespace}:{subject['name']}":
                return True
        if subject["kind"] == "User" and subject["name"] == user:
            return True
        if subject["kind"] == "Group" and user.startswith("system:serviceaccount:"):
            if subject["name"] in ("system:serviceaccounts", "system:authenticated"):
                return True
            if subject["name"] == f"system:serviceaccounts:{user.split(':')[2]}":
                return True
    return False


def _covers(grant: Grant, asked: Asked) -> bool:
    plural, _, subresource = asked.resource.partition("/")
    resources = {"*", asked.resource, f"*/{subresource}" if subresource else plural}
    return (
        grant.verb in ("*", asked.verb)
        and grant.group in ("*", asked.group)
        and grant.resource in resources
        and (not grant.names or (asked.name in grant.names))
    )


def _denial(user: str, asked: Asked) -> Refused:
    if asked.path:
        text = f'User "{user}" cannot {asked.verb} path "{asked.path}"'
        return Refused(403, "Forbidden", f"forbidden: {text}", {})
    where = f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
    why = (
        f'User "{user}" cannot {asked.verb} resource "{asked.resource}" in API group "{asked.group}" {where}'
    )
    return forbidden(asked.group, asked.resource.partition("/")[0], asked.name, why)

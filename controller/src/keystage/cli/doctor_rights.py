"""What each account of a Keystage release may do in its cluster, as the chart's roles grant it. Pure data.

`keystage doctor --kubernetes` asks the API server for each of these; a test holds the table and the chart's
roles against each other.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Scope = Literal["functions", "system", "cluster"]
"""The functions' namespace, the release's, or beyond namespaces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Right:
    """Verbs on one resource.

    Attributes:
        scope: where.
        group: API group, empty: the core.
        resource: plural, with `/subresource`.
        verbs: what is done.
        name: of the one object, empty: any.
    """

    scope: Scope
    group: str
    resource: str
    verbs: tuple[str, ...]
    name: str = ""


GATEWAY = (
    Right("functions", "keystage.dev", "functions", ("list", "watch", "create", "patch", "delete")),
    Right("functions", "", "pods", ("list", "watch")),
    Right("functions", "", "pods/log", ("get",)),
    Right("functions", "", "secrets", ("get", "list", "create", "patch", "delete")),
    Right("functions", "metrics.k8s.io", "pods", ("list",)),
)
CONTROLLER = (
    Right("functions", "keystage.dev", "functions", ("list", "watch", "patch")),
    Right("functions", "keystage.dev", "functions/status", ("patch",)),
    Right("functions", "", "pods", ("list", "watch", "create", "patch", "delete")),
    Right("functions", "", "pods/resize", ("patch",)),
    Right("functions", "apps", "deployments", ("list", "watch", "create", "patch", "delete")),
    Right("functions", "", "services", ("create", "patch", "delete")),
    Right("functions", "", "events", ("create",)),
    Right("functions", "policy", "poddisruptionbudgets", ("create", "patch", "delete")),
    Right("system", "coordination.k8s.io", "leases", ("get", "update"), "keystage-controller"),
    Right("system", "", "pods", ("list", "watch")),
    Right("cluster", "", "nodes", ("list", "watch")),
    Right("cluster", "", "pods", ("list", "watch")),
)
INSTALLER = (
    Right("cluster", "", "namespaces", ("create",)),
    Right("cluster", "apiextensions.k8s.io", "customresourcedefinitions", ("create",)),
    Right("cluster", "rbac.authorization.k8s.io", "clusterroles", ("create",)),
    Right("cluster", "rbac.authorization.k8s.io", "clusterrolebindings", ("create",)),
    Right("functions", "rbac.authorization.k8s.io", "roles", ("create",)),
    Right("system", "apps", "deployments", ("create",)),
    Right("system", "apps", "daemonsets", ("create",)),
    Right("system", "", "secrets", ("create",)),
)
"""What a person needs who runs `helm install`."""


def rights_of(user: str) -> tuple[str, tuple[Right, ...]]:
    """What an account should be allowed, by its name: `(who it is taken for, rights)`."""
    if user.startswith("system:serviceaccount:"):
        name = user.rsplit(":", 1)[1]
        for part, rights in (("gateway", GATEWAY), ("controller", CONTROLLER)):
            if name.endswith(part):
                return part, rights
    return "a person who installs", INSTALLER

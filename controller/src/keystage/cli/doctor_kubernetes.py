"""What `keystage doctor --kubernetes` asks of an API server, and what it makes of the answers.

`ask` does all exchanges and keeps what it may not see as a reason; judging is in `doctor_cluster`. It
writes nothing: access reviews are questions, although they are sent as POST.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from keystage.cli.doctor_rights import Right, Scope, rights_of
from keystage.kubernetes.client import FUNCTIONS, LEASES, NODES, PODS, Cluster, Kind, Object
from keystage.kubernetes.errors import ClusterError, Forbidden, NotFound

INGRESSES = Kind("networking.k8s.io/v1", "ingresses")
NAMESPACES = Kind("v1", "namespaces", is_namespaced=False)
ACCESS_REVIEWS = Kind("authorization.k8s.io/v1", "selfsubjectaccessreviews", is_namespaced=False)
SELF_REVIEWS = Kind("authentication.k8s.io/v1", "selfsubjectreviews", is_namespaced=False)
LEASE = "keystage-controller"
MANAGER = "keystage-doctor"


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What an API server told. None: that could not be seen, `hidden` says why.

    Attributes:
        namespace: of the release.
        function_namespace: of the functions.
        version: the server's, as `v1.36.2`.
        core: resources of the core API.
        ours: resources of keystage.dev/v1, None: the CRD is not there.
        has_metrics: whether somebody serves metrics.k8s.io.
        user: who asks.
        taken_for: who that is taken for.
        missing: rights that it lacks, one text each; None: it could not be asked.
        nodes: all nodes.
        system: pods of the release's namespace.
        functions: custom resources.
        lease: the controllers', empty: there is none.
        labels: of the functions' namespace.
        ingresses: of the release's namespace.
        hidden: why something could not be seen.
    """

    namespace: str
    function_namespace: str
    version: str
    core: frozenset[str]
    ours: frozenset[str] | None
    has_metrics: bool
    user: str
    taken_for: str
    missing: tuple[str, ...] | None
    nodes: list[Object] | None
    system: list[Object] | None
    functions: list[Object] | None
    lease: Object | None
    labels: dict[str, str] | None
    ingresses: list[Object] | None
    hidden: tuple[str, ...]


def ask(cluster: Cluster, function_namespace: str) -> Seen:
    """Everything that is looked at.

    Args:
        cluster: in the release's namespace.
        function_namespace: of the functions.

    Raises:
        ClusterError: not even the version is told.
    """
    version: str = msgspec.json.decode(cluster.raw("/version"))["gitVersion"]
    there = cluster.within(function_namespace)
    hidden: list[str] = []

    def seen(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except NotFound:
            return None
        except ClusterError as error:
            hidden.append(str(error))
            return None

    ours = _resources(cluster, "/apis/keystage.dev/v1")
    user = seen(lambda: _user(cluster)) or "unknown"
    taken_for, rights = rights_of(user)
    scopes: dict[Scope, str] = {"functions": function_namespace, "system": cluster.namespace, "cluster": ""}
    missing = seen(lambda: tuple(text for r in rights for text in _lacks(cluster, r, scopes[r.scope])))
    return Seen(
        namespace=cluster.namespace,
        function_namespace=function_namespace,
        version=version,
        core=_resources(cluster, "/api/v1") or frozenset(),
        ours=ours,
        has_metrics=_resources(cluster, "/apis/metrics.k8s.io/v1beta1") is not None,
        user=user,
        taken_for=taken_for,
        missing=missing,
        nodes=seen(lambda: cluster.list(NODES).items),
        system=seen(lambda: cluster.list(PODS).items),
        functions=seen(lambda: there.list(FUNCTIONS).items) if ours else None,
        lease=seen(lambda: _lease(cluster)),
        labels=seen(lambda: cluster.get(NAMESPACES, function_namespace)["metadata"].get("labels", {})),
        ingresses=seen(lambda: cluster.list(INGRESSES).items),
        hidden=tuple(hidden),
    )


def _resources(cluster: Cluster, path: str) -> frozenset[str] | None:
    """Names of what an API group serves, None: it is not there or does not answer."""
    try:
        body = msgspec.json.decode(cluster.raw(path), type=dict[str, Any])
    except NotFound:
        return None
    except Forbidden:
        raise
    except ClusterError:  # an aggregated API whose server is down answers 503
        return None
    return frozenset(resource["name"] for resource in body.get("resources", ()))


def _lease(cluster: Cluster) -> Object:
    try:
        return cluster.get(LEASES, LEASE)
    except NotFound:
        return {}


def _user(cluster: Cluster) -> str:
    body = {"apiVersion": SELF_REVIEWS.version, "kind": "SelfSubjectReview"}
    answer = cluster.create(SELF_REVIEWS, body, manager=MANAGER)
    name: str = answer["status"]["userInfo"]["username"]
    return name


def _lacks(cluster: Cluster, right: Right, namespace: str) -> list[str]:
    """Verbs that the account may not, as text."""
    resource, _, subresource = right.resource.partition("/")
    missing = []
    for verb in right.verbs:
        asked = {
            "verb": verb,
            "group": right.group,
            "resource": resource,
            "subresource": subresource,
            "namespace": namespace,
            "name": right.name,
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in asked.items() if value}},
        }
        if not cluster.create(ACCESS_REVIEWS, body, manager=MANAGER)["status"].get("allowed", False):
            where = f" in {namespace}" if namespace else ""
            group = f".{right.group}" if right.group else ""
            missing.append(f"{verb} {resource}{group}{'/' + subresource if subresource else ''}{where}")
    return missing

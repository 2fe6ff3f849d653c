"""The resources that the fake API server has: names, schemas, what each allows. Pure.

Schemas of built-in kinds are the published ones (package kubernetes-validate), so that unknown fields, wrong
types, list keys and patch strategies are those of the real server.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from support.kube.answers import Object
from support.kube.schema import Schema, Typed

KUBERNETES = "v1.36.0"
_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_EVERY = ("metadata.name", "metadata.namespace")


@dataclasses.dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where `scale` finds its numbers, as paths of names."""

    wanted: tuple[str, ...]
    present: tuple[str, ...]
    selector: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """One resource.

    Attributes:
        typed: schema of its objects.
        subresources: those it has.
        has_generation: `metadata.generation` counts changes of its spec.
        is_unconditional: PUT needs no resource version.
        is_made_by_put: PUT makes it where it is missing.
        returns_deleted: DELETE answers with the object, not with a Status.
        fields: what field selectors may name.
        scale: see `ScalePaths`, None: no scale subresource.
        name_rules: schema of `metadata` in a custom resource's definition.
    """

    group: str
    version: str
    plural: str
    kind: str
    typed: Typed
    is_namespaced: bool = True
    subresources: frozenset[str] = frozenset()
    has_generation: bool = False
    is_unconditional: bool = True
    returns_deleted: bool = False
    is_made_by_put: bool = False
    fields: tuple[str, ...] = _EVERY
    scale: ScalePaths | None = None
    name_rules: Typed | None = None
    is_custom: bool = False

    @property
    def api_version(self) -> str:
        """`group/version`, or the version of the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """Group and plural: unique."""
        return self.group, self.plural

    @property
    def has_status(self) -> bool:
        """Status is written through its own subresource only."""
        return "status" in self.subresources


@functools.cache
def definitions() -> dict[str, Schema]:
    """Published definitions of the built-in kinds."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"{KUBERNETES}-local"
    found: dict[str, Schema] = json.loads(Path(str(folder), "_definitions.json").read_bytes())["$defs"]
    return found


def _builtin(definition: str, group: str, version: str, plural: str, **more: Any) -> Resource:
    known = definitions()
    schema = {**known[f"io.k8s.{definition}"]}
    more["subresources"] = frozenset(more.get("subresources", ()))
    more["fields"] = (*_EVERY, *more.get("fields", ()))
    kind = definition.rpartition(".")[2]
    return Resource(group, version, plural, kind, Typed(schema, known, is_builtin=True), **more)


_REPLICAS = ScalePaths(("spec", "replicas"), ("status", "replicas"), ("spec", "selector"))
_POD_FIELDS = (
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
)
_EVENT_FIELDS = (
    *(
        f"involvedObject.{n}"
        for n in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
    ),
    "reason",
    "reportingComponent",
    "source",
    "type",
)
_ALL_POD = ("status", "log", "binding", "resize", "eviction", "ephemeralcontainers")


@functools.cache
def builtin_resources() -> tuple[Resource, ...]:
    """Every built-in resource that is served."""
    core, apps = "api.core.v1.", "api.apps.v1."
    rbac, rbac_group = "api.rbac.v1.", "rbac.authorization.k8s.io"
    extensions = "apiextensions-apiserver.pkg.apis.apiextensions.v1."
    workload = {"subresources": ("status", "scale"), "has_generation": True, "scale": _REPLICAS}
    status, counted = {"subresources": ("status",)}, {"has_generation": True}
    everywhere, conditional = {"is_namespaced": False}, {"is_unconditional": False}
    deleted, made = {"returns_deleted": True}, {"is_made_by_put": True}
    pod = {"subresources": _ALL_POD, "fields": _POD_FIELDS, **deleted, **counted}
    node, namespace = {"fields": ("spec.unschedulable",)}, {"fields": ("status.phase",)}
    definition = {**status, **counted, **conditional, **everywhere}
    return (
        _builtin(core + "Pod", "", "v1", "pods", **pod),
        _builtin(core + "Service", "", "v1", "services", **status, **deleted, **made),
        _builtin(core + "Secret", "", "v1", "secrets", fields=("type",)),
        _builtin(core + "ConfigMap", "", "v1", "configmaps"),
        _builtin(core + "ServiceAccount", "", "v1", "serviceaccounts", subresources=("token",), **deleted),
        _builtin(core + "Event", "", "v1", "events", fields=_EVENT_FIELDS, **made),
        _builtin(core + "PersistentVolumeClaim", "", "v1", "persistentvolumeclaims", **status),
        _builtin(core + "Node", "", "v1", "nodes", **status, **node, **everywhere),
        _builtin(core + "Namespace", "", "v1", "namespaces", **status, **namespace, **everywhere),
        _builtin(apps + "Deployment", "apps", "v1", "deployments", **workload),
        _builtin(apps + "ReplicaSet", "apps", "v1", "replicasets", fields=("status.replicas",), **workload),
        _builtin(apps + "DaemonSet", "apps", "v1", "daemonsets", **status, **counted),
        _builtin("api.coordination.v1.Lease", "coordination.k8s.io", "v1", "leases", **conditional, **made),
        _builtin("api.discovery.v1.EndpointSlice", "discovery.k8s.io", "v1", "endpointslices", **counted),
        _builtin(
            "api.policy.v1.PodDisruptionBudget",
            "policy",
            "v1",
            "poddisruptionbudgets",
            **status,
            **counted,
            **conditional,
        ),
        _builtin(rbac + "Role", rbac_group, "v1", "roles", **made),
        _builtin(rbac + "RoleBinding", rbac_group, "v1", "rolebindings", **made),
        _builtin(rbac + "ClusterRole", rbac_group, "v1", "clusterroles", **everywhere, **made),
        _builtin(rbac + "ClusterRoleBinding", rbac_group, "v1", "clusterrolebindings", **everywhere, **made),
        _builtin(
            extensions + "CustomResourceDefinition",
            "apiextensions.k8s.io",
            "v1",
            "customresourcedefinitions",
            **definition,
        ),
    )


def _path(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").strip(".").split(".")) if text else ()


def custom_resource(definition: Object) -> Resource:
    """The resource that a CustomResourceDefinition describes (its stored version)."""
    spec = definition["spec"]
    version = next(v for v in spec["versions"] if v["storage"])
    given = version["schema"]["openAPIV3Schema"]
    schema = {**given, "properties": {**given.get("properties", {})}}
    rules = schema["properties"].get("metadata")
    schema["properties"]["apiVersion"] = schema["properties"]["kind"] = {"type": "string"}
    schema["properties"].pop("metadata", None)
    typed = _Custom(schema, definitions(), is_builtin=False)
    subresources = version.get("subresources") or {}
    scale = subresources.get("scale")
    return Resource(
        spec["group"],
        version["name"],
        spec["names"]["plural"],
        spec["names"]["kind"],
        typed,
        is_namespaced=spec["scope"] == "Namespaced",
        subresources=frozenset(subresources),
        has_generation=True,
        is_unconditional=False,
        scale=scale
        and ScalePaths(
            _path(scale["specReplicasPath"]),
            _path(scale["statusReplicasPath"]),
            _path(scale.get("labelSelectorPath")),
        ),
        name_rules=None if rules is None else Typed(rules, {}, is_builtin=False),
        is_custom=True,
    )


class _Custom(Typed):
    """A custom resource's schema: its `metadata` is that of every object."""

    __slots__ = ()

    def field(self, name: str) -> Typed | None:
        if name == "metadata":
            return Typed(self.definitions[_META], self.definitions, is_builtin=True)
        return super().field(name)

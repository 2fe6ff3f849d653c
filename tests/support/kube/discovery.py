"""What the API server tells of itself: version, health, which resources it has. Pure."""

from __future__ import annotations

from support.kube.answers import Object, no_resource
from support.kube.kinds import KUBERNETES, Resource

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def discovered(path: str, resources: list[Resource]) -> Object | bytes:
    """Answer to a GET of something that is no resource.

    Raises:
        Refused: 404.
    """
    match path.strip("/").split("/"):
        case ["version"]:
            major, minor, _ = KUBERNETES.removeprefix("v").split(".")
            return {"major": major, "minor": minor, "gitVersion": KUBERNETES, "platform": "linux/amd64"}
        case ["healthz" | "livez" | "readyz"]:
            return b"ok"
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = sorted({(r.group, r.version) for r in resources if r.group})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*g) for g in groups]}
        case ["api", version]:
            return _listed("", version, resources)
        case ["apis", "metrics.k8s.io", "v1beta1"]:
            pods = {"name": "pods", "namespaced": True, "kind": "PodMetrics", "verbs": ["get", "list"]}
            version = "metrics.k8s.io/v1beta1"
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": [pods],
            }
        case ["apis", group, version]:
            return _listed(group, version, resources)
        case _:
            raise no_resource()


def _group(group: str, version: str) -> Object:
    known = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [known], "preferredVersion": known}


def _listed(group: str, version: str, resources: list[Resource]) -> Object:
    found = [r for r in resources if (r.group, r.version) == (group, version)]
    if not found:
        raise no_resource()
    listed: list[Object] = []
    for resource in found:
        entry: Object = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.is_namespaced,
            "kind": resource.kind,
            "verbs": _VERBS,
        }
        listed.append(entry)
        listed += [
            {
                **entry,
                "name": f"{resource.plural}/{s}",
                "singularName": "",
                "verbs": ["get", "patch", "update"],
            }
            for s in sorted(resource.subresources)
        ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": listed,
    }

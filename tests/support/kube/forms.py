"""Forms in which objects are told: typed lists, or metadata alone where a client asks so. Pure."""

from __future__ import annotations

from support.kube.answers import Object
from support.kube.kinds import Resource

_META_VERSION = "meta.k8s.io/v1"


def list_of(resource: Resource, items: list[Object], meta: Object) -> Object:
    """A list; items of a built-in kind leave out what the list's own kind says."""
    if not resource.is_custom:
        items = [{k: v for k, v in i.items() if k not in ("kind", "apiVersion")} for i in items]
    return {
        "kind": f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": meta,
        "items": items,
    }


def in_form(accept: str, body: Object) -> Object:
    """The body, or its metadata alone if `accept` names no other form first."""
    first = accept.partition(",")[0].replace(" ", "")
    if "as=PartialObjectMetadataList;" in first + ";" and "items" in body:
        return {
            "kind": "PartialObjectMetadataList",
            "apiVersion": _META_VERSION,
            "metadata": body["metadata"],
            "items": [_partial(item) for item in body["items"]],
        }
    if "as=PartialObjectMetadata;" in first + ";" and "metadata" in body:
        return _partial(body)
    return body


def _partial(item: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": _META_VERSION, "metadata": item["metadata"]}

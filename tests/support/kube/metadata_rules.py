"""What the API server refuses of an object's metadata: name, labels, annotations, owners. Pure."""

from __future__ import annotations

import re
from typing import Any

from support.kube.answers import Cause, Object
from support.kube.kinds import Resource
from support.kube.selectors import is_label_key, is_label_value

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SEGMENT = re.compile(r"[^/%]+")
_MAX_ANNOTATIONS_BYTES = 256 * 1024


def invalid_value(field: str, value: Any, why: str) -> Cause:
    """A value that breaks a rule."""
    told = f'"{value}"' if isinstance(value, str) else str(value)
    return Cause("FieldValueInvalid", f"Invalid value: {told}: {why}", field)


def required(field: str, why: str = "") -> Cause:
    """A value that is missing."""
    return Cause("FieldValueRequired", f"Required value: {why}" if why else "Required value", field)


def metadata_faults(item: Object, resource: Resource) -> list[Cause]:
    """All of them."""
    meta = item["metadata"]
    if not meta.get("name"):
        return [required("metadata.name", "name or generateName is required")]
    return [*_name_faults(meta["name"], resource), *_label_faults(meta), *_owner_faults(meta)]


def _name_faults(name: str, resource: Resource) -> list[Cause]:
    shape, most = SUBDOMAIN, 253
    if resource.plural == "services":
        shape, most = _LABEL_1035, 63
    elif resource.plural == "namespaces":
        shape, most = LABEL_1123, 63
    elif resource.group == "rbac.authorization.k8s.io":
        shape = _SEGMENT
    if len(name) <= most and shape.fullmatch(name):
        return []
    return [invalid_value("metadata.name", name, f"must match {shape.pattern} and be at most {most} long")]


def _label_faults(meta: Object) -> list[Cause]:
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    why = "must consist of alphanumeric characters, '-', '_' or '.'"
    found = [invalid_value("metadata.labels", k, why) for k in labels if not is_label_key(k)]
    found += [invalid_value("metadata.labels", v, why) for v in labels.values() if not is_label_value(v)]
    found += [
        invalid_value("metadata.annotations", k, why) for k in annotations if not is_label_key(k.lower())
    ]
    total_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items())
    if total_bytes > _MAX_ANNOTATIONS_BYTES:
        text = f"Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes"
        found.append(Cause("FieldValueTooLong", text, "metadata.annotations"))
    return found


def _owner_faults(meta: Object) -> list[Cause]:
    owners = meta.get("ownerReferences") or []
    found = [
        invalid_value(f"metadata.ownerReferences[{index}].{key}", "", "must not be empty")
        for index, owner in enumerate(owners)
        for key in ("apiVersion", "kind", "name", "uid")
        if not owner.get(key)
    ]
    if sum(bool(o.get("controller")) for o in owners) > 1:
        why = "Only one reference can have Controller set to true"
        found.append(invalid_value("metadata.ownerReferences", "", why))
    return found

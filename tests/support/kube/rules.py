"""What the API server refuses of an object beyond its schema, kind by kind. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

from support.kube.answers import Cause, Object
from support.kube.defaults import qos_class
from support.kube.metadata_rules import LABEL_1123, invalid_value, required
from support.kube.quantities import value_of
from support.kube.selectors import of_label_selector

_MAX_SECRET_BYTES = 1024 * 1024


def _pod_spec_faults(spec: Object, at: str) -> list[Cause]:
    found: list[Cause] = []
    containers = spec.get("containers") or []
    if not containers:
        found.append(required(f"{at}.containers"))
    volumes = {v.get("name") for v in spec.get("volumes", ())}
    seen: set[str] = set()
    for index, container in enumerate(containers):
        where = f"{at}.containers[{index}]"
        name = container.get("name", "")
        if not LABEL_1123.fullmatch(name) or len(name) > 63:
            found.append(invalid_value(f"{where}.name", name, "a lowercase RFC 1123 label"))
        if name in seen:
            found.append(Cause("FieldValueDuplicate", f'Duplicate value: "{name}"', f"{where}.name"))
        seen.add(name)
        if not container.get("image"):
            found.append(required(f"{where}.image"))
        found += [
            Cause(
                "FieldValueNotFound", f'Not found: "{mount["name"]}"', f"{where}.volumeMounts[{number}].name"
            )
            for number, mount in enumerate(container.get("volumeMounts", ()))
            if mount["name"] not in volumes
        ]
        found += _resource_faults(container.get("resources", {}), f"{where}.resources")
        found += [
            required(f"{where}.env[{number}].name")
            for number, variable in enumerate(container.get("env", ()))
            if not variable.get("name")
        ]
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        found.append(
            invalid_value(f"{at}.terminationGracePeriodSeconds", -1, "must be greater than or equal to 0")
        )
    return found


def _resource_faults(resources: Object, at: str) -> list[Cause]:
    found: list[Cause] = []
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, text in requests.items():
        if name in limits and value_of(text) > value_of(limits[name]):
            why = f"must be less than or equal to {name} limit of {limits[name]}"
            found.append(invalid_value(f"{at}.requests", text, why))
    return found + [
        invalid_value(f"{at}.requests", requests.get(name), f"must be equal to {name} limit")
        for name in sorted({*requests, *limits})
        if "/" in name and requests.get(name) != limits.get(name)
    ]


def pod_faults(item: Object, before: Object | None) -> list[Cause]:
    """A pod, new or changed: only images, grace and added tolerations may change."""
    if before is None:
        return _pod_spec_faults(item["spec"], "spec")
    old, new = copy.deepcopy(before["spec"]), copy.deepcopy(item["spec"])
    for mine, theirs in zip(new.get("containers", ()), old.get("containers", ()), strict=False):
        mine["image"] = theirs.get("image")
    for spec in (old, new):
        spec.pop("activeDeadlineSeconds", None)
    tolerations = new.pop("tolerations", [])
    if all(t in tolerations for t in old.pop("tolerations", [])) and new == old:
        return []
    return [
        Cause(
            "FieldValueForbidden",
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions "
            "to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it "
            "was previously negative)",
            "spec",
        )
    ]


def resize_faults(item: Object, before: Object) -> list[Cause]:
    """A pod after a resize: its QoS class stays, and nothing but CPU and memory changes."""
    found = _pod_spec_faults(item["spec"], "spec")
    old, new = copy.deepcopy(before["spec"]), copy.deepcopy(item["spec"])
    for spec in (old, new):
        for container in spec.get("containers", ()):
            for part in ("requests", "limits"):
                for name in ("cpu", "memory"):
                    container.get("resources", {}).get(part, {}).pop(name, None)
            container["resources"] = {k: v for k, v in container.get("resources", {}).items() if v}
            container.pop("resizePolicy", None)
    if old != new:
        why = "Forbidden: only cpu and memory resources for containers are mutable"
        found.append(Cause("FieldValueForbidden", why, "spec"))
    if qos_class(item["spec"]) != qos_class(before["spec"]):
        why = "Pod QOS Class may not change as a result of resizing"
        found.append(invalid_value("spec", qos_class(item["spec"]), why))
    for index, (mine, theirs) in enumerate(
        zip(item["spec"]["containers"], before["spec"]["containers"], strict=False)
    ):
        for part in ("requests", "limits"):
            gone = set(theirs["resources"].get(part, {})) - set(mine["resources"].get(part, {}))
            if gone:
                why = f"Forbidden: resource {part} cannot be removed"
                found.append(Cause("FieldValueForbidden", why, f"spec.containers[{index}].resources.{part}"))
    return found


def _workload_faults(item: Object, before: Object | None) -> list[Cause]:
    spec = item["spec"]
    found = _pod_spec_faults(spec["template"].get("spec", {}), "spec.template.spec")
    selector = spec.get("selector")
    if not selector:
        found.append(required("spec.selector"))
    elif not of_label_selector(selector)({"metadata": spec["template"].get("metadata", {})}):
        labels = spec["template"].get("metadata", {}).get("labels")
        found.append(
            invalid_value(
                "spec.template.metadata.labels", labels, "`selector` does not match template `labels`"
            )
        )
    if spec.get("replicas", 0) < 0:
        found.append(invalid_value("spec.replicas", spec["replicas"], "must be greater than or equal to 0"))
    if before is not None and before["spec"].get("selector") != selector:
        found.append(invalid_value("spec.selector", selector, "field is immutable"))
    rolling = spec.get("strategy", {}).get("rollingUpdate")
    if rolling and spec["strategy"]["type"] == "Recreate":
        why = "Forbidden: may not be specified when strategy `type` is 'Recreate'"
        found.append(Cause("FieldValueForbidden", why, "spec.strategy.rollingUpdate"))
    if rolling and not any(str(rolling[k]).strip("%0") for k in ("maxSurge", "maxUnavailable")):
        why = "may not be 0 when `maxSurge` is 0"
        found.append(invalid_value("spec.strategy.rollingUpdate.maxUnavailable", 0, why))
    policy = spec["template"].get("spec", {}).get("restartPolicy")
    if policy != "Always":
        text = f'Unsupported value: "{policy}": supported values: "Always"'
        found.append(Cause("FieldValueNotSupported", text, "spec.template.spec.restartPolicy"))
    return found


def _service_faults(item: Object, before: Object | None) -> list[Cause]:
    found: list[Cause] = []
    spec = item["spec"]
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        found.append(required("spec.ports"))
    ports = spec.get("ports", [])
    found += [
        required(f"spec.ports[{index}].name")
        for index, port in enumerate(ports)
        if len(ports) > 1 and not port.get("name")
    ]
    if before is not None and spec.get("clusterIP") != before["spec"].get("clusterIP"):
        found.append(invalid_value("spec.clusterIPs[0]", spec.get("clusterIP"), "may not change once set"))
    return found


def _secret_faults(item: Object, before: Object | None) -> list[Cause]:
    data = item.get("data", {})
    found = [
        invalid_value(f"data[{key}]", key, "a valid config key must consist of alphanumeric characters")
        for key in data
        if not re.fullmatch(r"[-._a-zA-Z0-9]+", key) or len(key) > 253
    ]
    if sum(len(v) * 3 // 4 - v.count("=") for v in data.values()) > _MAX_SECRET_BYTES:
        found.append(Cause("FieldValueTooLong", "Too long: may not be more than 1048576 bytes", "data"))
    if before is not None and before.get("type") != item.get("type"):
        found.append(invalid_value("type", item.get("type"), "field is immutable"))
    if before is not None and before.get("immutable") and before.get("data") != data:
        found.append(
            Cause("FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set", "data")
        )
    return found


def _lease_faults(item: Object, before: Object | None) -> list[Cause]:
    spec = item.get("spec", {})
    found: list[Cause] = []
    if spec.get("leaseDurationSeconds", 1) <= 0:
        found.append(
            invalid_value("spec.leaseDurationSeconds", spec["leaseDurationSeconds"], "must be greater than 0")
        )
    if spec.get("leaseTransitions", 0) < 0:
        found.append(invalid_value("spec.leaseTransitions", spec["leaseTransitions"], "must not be negative"))
    return found


FAULTS: dict[str, Callable[[Object, Object | None], list[Cause]]] = {
    "pods": pod_faults,
    "deployments": _workload_faults,
    "replicasets": _workload_faults,
    "daemonsets": _workload_faults,
    "services": _service_faults,
    "secrets": _secret_faults,
    "leases": _lease_faults,
}
"""By plural name: given the object and what it was before."""

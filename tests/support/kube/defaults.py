"""What the API server fills into built-in kinds: the defaults that a reader of its answers meets. Pure."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from support.kube.answers import Object

_TOLERATED = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def _container(container: Object, *, is_on_host: bool = False) -> None:
    image = container.get("image", "")
    latest = image.rpartition("/")[2].partition(":")[2] in ("", "latest") and "@" not in image
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    resources = container.setdefault("resources", {})
    if limits := resources.get("limits"):
        resources["requests"] = {**limits, **resources.get("requests", {})}
    for port in container.get("ports", ()):
        port.setdefault("protocol", "TCP")
        if is_on_host:
            port.setdefault("hostPort", port["containerPort"])
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe := container.get(name):
            for key, value in _PROBE.items():
                probe.setdefault(key, value)
            if get := probe.get("httpGet"):
                get.setdefault("scheme", "HTTP")
                get.setdefault("path", "/")
    if hook := (container.get("lifecycle") or {}).get("preStop", {}).get("httpGet"):
        hook.setdefault("scheme", "HTTP")
    for variable in container.get("env", ()):
        if field := (variable.get("valueFrom") or {}).get("fieldRef"):
            field.setdefault("apiVersion", "v1")


def _volume(volume: Object) -> None:
    for source in ("secret", "configMap", "projected", "downwardAPI"):
        if source in volume:
            volume[source].setdefault("defaultMode", 420)
    if "hostPath" in volume:
        volume["hostPath"].setdefault("type", "")
    if set(volume) == {"name"}:
        volume["emptyDir"] = {}


def pod_spec(spec: Object, *, is_template: bool = False) -> None:
    """Of a pod or of a template; a template does not get what admission adds."""
    for name, value in (
        ("restartPolicy", "Always"),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("terminationGracePeriodSeconds", 30),
        ("securityContext", {}),
    ):
        spec.setdefault(name, value)
    if account := spec.get("serviceAccountName") or spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"] = account
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        _container(container, is_on_host=bool(spec.get("hostNetwork")))
    for volume in spec.get("volumes", ()):
        _volume(volume)
    if not is_template:
        spec.setdefault("enableServiceLinks", True)


def admit(spec: Object) -> None:
    """What admission adds to a pod; it has no owner."""
    spec["serviceAccountName"] = spec["serviceAccount"] = spec.get("serviceAccountName") or "default"
    spec.setdefault("priority", 0)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    tolerations = spec.setdefault("tolerations", [])
    for key in _TOLERATED:
        if not any(t.get("key") == key for t in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )


def qos_class(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort."""
    containers = [*spec.get("initContainers", ()), *spec.get("containers", ())]
    resources = [c.get("resources", {}) for c in containers]
    counted = ("cpu", "memory")
    if not any(r.get(k, {}).get(n) for r in resources for k in ("requests", "limits") for n in counted):
        return "BestEffort"
    if all(
        r.get("limits", {}).get(n) is not None and r.get("requests", {}).get(n) == r["limits"][n]
        for r in resources
        for n in counted
    ):
        return "Guaranteed"
    return "Burstable"


def _pod(item: Object) -> None:
    pod_spec(item["spec"])


def _template_of(item: Object) -> None:
    template = item["spec"].setdefault("template", {})
    pod_spec(template.setdefault("spec", {}), is_template=True)


def _deployment(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("replicas", 1)
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("progressDeadlineSeconds", 600)
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxUnavailable", "25%")
        rolling.setdefault("maxSurge", "25%")
    _template_of(item)


def _replica_set(item: Object) -> None:
    item["spec"].setdefault("replicas", 1)
    _template_of(item)


def _daemon_set(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("updateStrategy", {"type": "RollingUpdate"})
    _template_of(item)


def _service(item: Object) -> None:
    spec = item["spec"]
    for name, value in (
        ("type", "ClusterIP"),
        ("sessionAffinity", "None"),
        ("internalTrafficPolicy", "Cluster"),
        ("ipFamilyPolicy", "SingleStack"),
        ("ipFamilies", ["IPv4"]),
    ):
        spec.setdefault(name, value)
    for port in spec.get("ports", ()):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _secret(item: Object) -> None:
    item.setdefault("type", "Opaque")
    for name, value in item.pop("stringData", {}).items():
        item.setdefault("data", {})[name] = base64.b64encode(value.encode()).decode()


def _event(item: Object) -> None:
    item.setdefault("source", {})
    item.setdefault("reportingComponent", "")
    item.setdefault("reportingInstance", "")


def _namespace(item: Object) -> None:
    item.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
    item.setdefault("status", {}).setdefault("phase", "Active")
    item["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = item["metadata"]["name"]


FILLERS: dict[str, Callable[[Any], None]] = {
    "pods": _pod,
    "deployments": _deployment,
    "replicasets": _replica_set,
    "daemonsets": _daemon_set,
    "services": _service,
    "secrets": _secret,
    "events": _event,
    "namespaces": _namespace,
}
"""By plural name."""

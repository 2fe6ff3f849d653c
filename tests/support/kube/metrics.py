"""What pods use, as a metrics server tells it (metrics.k8s.io); there is none until a test says so."""

from __future__ import annotations

import threading

from support.kube.answers import Object, Refused, no_resource, not_found
from support.kube.registry import Registry
from support.kube.requests import Asking
from support.kube.selectors import by_labels
from support.kube.writes import now_text

GROUP = "metrics.k8s.io"
_VERSION = f"{GROUP}/v1beta1"


class Metrics:
    """Use of pods by namespace and name.

    Args:
        registry: where pods are.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str], tuple[str, str]] = {}
        self.is_served = False
        """A metrics server is installed."""
        self.is_down = False
        """It is, and does not answer."""

    def use(self, namespace: str, pod: str, cpu: str, memory: str) -> None:
        """A pod uses so much; a metrics server is there from now on."""
        self.is_served = True
        with self._lock:
            self._used[namespace, pod] = (cpu, memory)

    def is_asked(self, asking: Asking) -> bool:
        """The request is for it, and not for a custom resource that stands in its place."""
        return asking.group == GROUP and all(r.group != GROUP for r in self._registry.resources())

    def answer(self, asking: Asking) -> Object:
        """GET of one pod's use, or a list.

        Raises:
            Refused: 404, nobody serves it or knows the pod; 503, the server is down.
        """
        self.check()
        if asking.plural != "pods" or asking.verb not in ("get", "list"):
            raise no_resource()
        matches = by_labels(asking.query.get("labelSelector", ""))
        found = []
        for pod in self._registry.list(self._registry.named("pods"), asking.namespace)[1]:
            with self._lock:
                used = self._used.get((pod["metadata"]["namespace"], pod["metadata"]["name"]))
            if used is not None and matches(pod):
                found.append(_use_of(pod, *used))
        if asking.verb == "list":
            return {"kind": "PodMetricsList", "apiVersion": _VERSION, "metadata": {}, "items": found}
        for item in found:
            if item["metadata"]["name"] == asking.name:
                return item
        raise not_found(GROUP, "pods", asking.name)

    def check(self) -> None:
        """Raises what a missing or a silent server stands for."""
        if not self.is_served:
            raise no_resource()
        if self.is_down:
            text = "the server is currently unable to handle the request"
            raise Refused(503, "ServiceUnavailable", text)


def _use_of(pod: Object, cpu: str, memory: str) -> Object:
    meta = {k: pod["metadata"][k] for k in ("name", "namespace", "labels") if k in pod["metadata"]}
    usage = {"cpu": cpu, "memory": memory}
    return {
        "kind": "PodMetrics",
        "apiVersion": _VERSION,
        "metadata": {**meta, "creationTimestamp": now_text()},
        "timestamp": now_text(),
        "window": "15s",
        "containers": [{"name": c["name"], "usage": usage} for c in pod["spec"]["containers"]],
    }

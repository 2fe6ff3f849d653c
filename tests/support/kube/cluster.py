"""The whole fake cluster: `Kube`. See `fixtures` for how to use it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from kubernetes.client import ApiClient, Configuration
from support.kube.access import ADMIN, Access
from support.kube.answers import Object
from support.kube.deletion import Collector, delete
from support.kube.faults import Faults
from support.kube.kubelet import Kubelet
from support.kube.metrics import Metrics
from support.kube.nodes import Nodes
from support.kube.players import Players
from support.kube.pod_logs import PodLogs
from support.kube.registry import MERGE, PLAYER, Registry
from support.kube.scheduler import Scheduler
from support.kube.server import Face
from support.kube.workloads import Workloads

from keystage.kubernetes.client import Cluster

SYSTEM_NAMESPACE = "keystage"
"""Namespace of the release."""
FUNCTION_NAMESPACE = "keystage-fn"
"""Namespace of functions."""
CRD = Path(__file__).parents[3] / "charts" / "keystage" / "templates" / "crd.yaml"
T = TypeVar("T")


def crd() -> Object:
    """The chart's custom resource definition, without its template lines."""
    text = re.sub(r"\{\{-? ?/\*.*?\*/ ?-?\}\}", "", CRD.read_text(), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if "{{" not in line]
    found: Object = yaml.safe_load("\n".join(lines))
    found["metadata"].pop("labels", None)
    return found


class Kube:
    """A fake cluster: API server, collector, and players of nodes on demand."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.access = Access(self.registry)
        self.faults = Faults()
        self.logs = PodLogs()
        self.metrics = Metrics(self.registry)
        self.face = Face(self.registry, self.access, self.faults, self.logs, self.metrics)
        self.nodes = Nodes(self.registry)
        self.kubelet = Kubelet(self.registry, self.logs, FUNCTION_NAMESPACE)
        self.scheduler = Scheduler(self.registry)
        self.workloads = Workloads(self.registry)
        self.players = Players(self.registry, self.scheduler, self.kubelet, self.workloads)
        self._collector = Collector(self.registry)
        self._clients: list[ApiClient] = []

    def start(self, *, has_crd: bool = True) -> None:
        """Listens; the chart's CRD and both namespaces are there."""
        for name in (SYSTEM_NAMESPACE, FUNCTION_NAMESPACE):
            self.registry.create(self.registry.named("namespaces"), "", {"metadata": {"name": name}}, PLAYER)
        if has_crd:
            self.registry.create(self.registry.named("customresourcedefinitions"), "", crd(), PLAYER)
        self._collector.start()
        self.face.start()

    def stop(self) -> None:
        """Ends everything; bugs of the fake itself come out here."""
        self.players.stop()
        self._collector.stop()
        self.face.stop()
        for client in self._clients:
            client.close()
        for error in [*self.face.errors, *self.players.errors]:
            raise error

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.face.port}"

    def api_client(self, service_account: str = "", namespace: str = SYSTEM_NAMESPACE) -> ApiClient:
        """An official client: a service account's, bound by its roles, or of one who may do everything."""
        configuration = Configuration(host=self.url)
        token = self.access.token(service_account, namespace) if service_account else ADMIN
        configuration.api_key = {"authorization": f"Bearer {token}"}
        configuration.retries = False
        configuration.connection_pool_maxsize = 32
        client = ApiClient(configuration)
        self._clients.append(client)
        return client

    def cluster(self, namespace: str = FUNCTION_NAMESPACE, service_account: str = "") -> Cluster:
        """Keystage's own facade."""
        return Cluster(self.api_client(service_account), namespace)

    def kubeconfig(self, path: Path, service_account: str = "", namespace: str = FUNCTION_NAMESPACE) -> Path:
        """Writes a kubeconfig for this server (`namespace`: the default one in it)."""
        token = self.access.token(service_account, SYSTEM_NAMESPACE) if service_account else ADMIN
        named = {"name": "fake"}
        content: Object = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{**named, "cluster": {"server": self.url}}],
            "users": [{**named, "user": {"token": token}}],
            "contexts": [{**named, "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    def load(self, *documents: Object, namespace: str = SYSTEM_NAMESPACE) -> None:
        """Puts manifests in, in place of existing ones; kinds that are not served are passed over."""
        for document in documents:
            resource = self.registry.of_kind(document["apiVersion"], document["kind"])
            if resource is None:
                continue
            where = document["metadata"].get("namespace", namespace) if resource.is_namespaced else ""
            name = document["metadata"]["name"]
            if self.registry.store.get(resource, (where, name)) is not None:
                delete(self.registry, resource, where, name, {"gracePeriodSeconds": 0})
            self.registry.create(resource, where, document, PLAYER)

    def get(self, plural: str, name: str, namespace: str = FUNCTION_NAMESPACE) -> Object:
        """An object as it is now; not to be changed."""
        resource = self.registry.named(plural)
        return self.registry.get(resource, namespace if resource.is_namespaced else "", name)

    def list(
        self, plural: str, namespace: str = FUNCTION_NAMESPACE, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """Objects as they are now."""
        resource = self.registry.named(plural)
        return self.registry.list(resource, namespace if resource.is_namespaced else "", labels, fields)[1]

    def patch(
        self,
        plural: str,
        name: str,
        changes: Object,
        namespace: str = FUNCTION_NAMESPACE,
        subresource: str = "",
    ) -> Object:
        """Somebody else's merge patch."""
        import json

        resource = self.registry.named(plural)
        where = namespace if resource.is_namespaced else ""
        raw = json.dumps(changes).encode()
        return self.registry.patch(resource, where, name, raw, MERGE, "somebody", subresource=subresource)[0]

    def delete(self, plural: str, name: str, namespace: str = FUNCTION_NAMESPACE, **options: Any) -> None:
        """Somebody else's deletion; options as in `DeleteOptions`."""
        resource = self.registry.named(plural)
        delete(self.registry, resource, namespace if resource.is_namespaced else "", name, options)

    def until(self, found: Callable[[], T], *, timeout_s: float = 30.0, what: str = "") -> T:
        """Waits until `found()` is true (a `Refused` counts as false); gives its value.

        Raises:
            AssertionError: it did not become so in time.
        """
        from support.kube.answers import Refused

        end = time.monotonic() + timeout_s
        while True:
            value: T | None = None
            with contextlib.suppress(Refused):
                value = found()
            if value:
                return value
            assert time.monotonic() < end, f"not so after {timeout_s} s: {what or found}"
            with self.registry.store.changed:
                self.registry.store.changed.wait(0.05)

    def play(self, *, start_s: float = 0.0, ready_s: float = 0.0, stop_s: float = 0.0) -> None:
        """From now on the scheduler, the kubelets and the Deployment controller play by themselves."""
        self.players.start_s, self.players.ready_s, self.players.stop_s = start_s, ready_s, stop_s
        self.players.start()

    def outage(self) -> contextlib.AbstractContextManager[None]:
        """Within it nobody listens; the port stays the same. Objects are kept, connections break."""

        @contextlib.contextmanager
        def within() -> Any:
            self.face.stop()
            try:
                yield
            finally:
                self.face.start()

        return within()

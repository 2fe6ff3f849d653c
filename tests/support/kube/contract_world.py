"""The two worlds of the contract suite: the fake API server, and the real one that KUBECONFIG names.

In both, everything goes over HTTP as one who may do everything; there is a node of the suite's own on which
no kubelet runs, so that pods stay as the suite leaves them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import pytest
from kubernetes.client import ApiClient
from support.kube.answers import Object
from support.kube.cluster import Kube, crd

from keystage.kubernetes.client import FUNCTIONS, NODES, PODS, Cluster, Kind, connect
from keystage.kubernetes.errors import ClusterError, Conflict, NotFound

NAMESPACES = Kind("v1", "namespaces", is_namespaced=False)
CRDS = Kind("apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
T = TypeVar("T")


def name_of(item: Object) -> str:
    """Its name."""
    return str(item["metadata"]["name"])


class World:
    """One API server and a namespace in it.

    Args:
        api: its client.
        namespace: the suite's own.
        node: a node without a kubelet.
        is_real: not the fake.
    """

    def __init__(self, api: ApiClient, namespace: str, node: str, *, is_real: bool) -> None:
        self.api, self.namespace, self.node, self.is_real = api, namespace, node, is_real
        self.cluster = Cluster(api, namespace)
        self._count = 0

    def name(self, prefix: str = "x") -> str:
        """A name not used yet."""
        self._count += 1
        return f"{prefix}{self._count}"

    def path(self, kind: Kind, *parts: str, namespace: str = "") -> str:
        """Path of a resource in the suite's namespace."""
        where = f"/namespaces/{namespace or self.namespace}" if kind.is_namespaced else ""
        return "/".join([kind.prefix + where, kind.plural, *parts])

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
        token: str = "",
    ) -> tuple[int, Any]:
        """One exchange as it is: status and decoded body."""
        settings = self.api.configuration
        headers = {"Content-Type": content, "Accept": "application/json", "User-Agent": "contract/1"}
        pool = self.api.rest_client.pool_manager
        if token:
            headers["Authorization"] = f"Bearer {token}"
            pool = _without_certificate(self.api)
        else:
            for setting in settings.auth_settings().values():
                headers[setting["key"]] = setting["value"]
        encoded = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = settings.host + path + (f"?{urlencode(query)}" if query else "")
        answer = pool.request(method, url, body=encoded, headers=headers, retries=False, timeout=10)
        try:
            return answer.status, json.loads(answer.data)
        except ValueError:
            return answer.status, answer.data

    def until(self, found: Callable[[], T], timeout_s: float = 20.0) -> T:
        """Waits until something is true; gives it."""
        end = time.monotonic() + timeout_s
        while not (value := found()):
            assert time.monotonic() < end, f"not so after {timeout_s} s"
            time.sleep(0.05)
        return value

    def function(self, name: str = "", **spec: Any) -> Object:
        """A function, as it is sent."""
        return {
            "apiVersion": "keystage.dev/v1",
            "kind": "Function",
            "metadata": {"name": name or self.name("f")},
            "spec": {"image": "image:1", **spec},
        }

    def made(self, labels: Mapping[str, str] | None = None, **spec: Any) -> Object:
        """A new function."""
        body = self.function(**spec)
        if labels:
            body["metadata"]["labels"] = dict(labels)
        made: Object = self.cluster.create(FUNCTIONS, body, manager="test")
        return made

    def is_gone(self, kind: Kind, name: str) -> bool:
        """There is no such object."""
        try:
            self.cluster.get(kind, name)
        except NotFound:
            return True
        return False

    def pod(self, name: str = "", **spec: Any) -> Object:
        """A pod that no scheduler touches."""
        container = {"name": "function", "image": "none.invalid/x:1"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name or self.name("pod")},
            "spec": {
                "schedulerName": "nobody",
                "automountServiceAccountToken": False,
                "containers": [container],
                **spec,
            },
        }

    def made_pod(self, **spec: Any) -> Object:
        """A new pod."""
        made: Object = self.cluster.create(PODS, self.pod(**spec), manager="test")
        return made

    def bound_pod(self, **spec: Any) -> Object:
        """A new pod on the suite's node."""
        pod = self.made_pod(**spec)
        name = pod["metadata"]["name"]
        status, _ = self.raw("POST", self.path(PODS, name, "binding"), self.binding(name))
        assert status == 201
        bound: Object = self.cluster.get(PODS, name)
        return bound

    def binding(self, name: str) -> Object:
        """Body that binds a pod to the suite's node."""
        target = {"apiVersion": "v1", "kind": "Node", "name": self.node}
        return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}


def _without_certificate(api: ApiClient) -> Any:
    import urllib3

    settings = api.configuration
    if not settings.host.startswith("https"):
        return api.rest_client.pool_manager
    return urllib3.PoolManager(cert_reqs="CERT_REQUIRED", ca_certs=settings.ssl_ca_cert)


def fake_world() -> Iterator[World]:
    """The fake one."""
    kube = Kube()
    kube.start()
    try:
        api = kube.api_client()
        yield from _furnished(api, is_real=False)
    finally:
        kube.stop()


def real_world() -> Iterator[World]:
    """The real one; skips without KUBECONFIG. It leaves the custom resource only if that was there before."""
    config = os.environ.get("KUBECONFIG")
    if not config:
        pytest.skip("KUBECONFIG is not set")
    api = connect(Path(config))
    cluster = Cluster(api, "default")
    try:
        is_ours = _define(cluster)
        try:
            yield from _furnished(api, is_real=True)
        finally:
            if is_ours:
                cluster.delete(CRDS, name_of(crd()))
    finally:
        api.close()


def _define(cluster: Cluster) -> bool:
    """Makes the custom resource's definition; False: it is there already, a release's."""
    body = crd()
    end = time.monotonic() + 60
    while True:
        try:
            cluster.create(CRDS, body, manager="contract")
        except Conflict:
            with contextlib.suppress(NotFound):
                if "deletionTimestamp" not in cluster.get(CRDS, name_of(body))["metadata"]:
                    return False
            assert time.monotonic() < end, "an earlier custom resource does not go"
            time.sleep(0.2)
        else:
            return True


def _furnished(api: ApiClient, *, is_real: bool) -> Iterator[World]:
    mark = uuid.uuid4().hex[:6]
    namespace, node = f"contract-{mark}", f"contract-{mark}"
    cluster = Cluster(api, namespace)
    cluster.create(NAMESPACES, {"metadata": {"name": namespace}}, manager="contract")
    taint = {"key": "keystage.dev/contract", "effect": "NoSchedule"}
    body = {"metadata": {"name": node}, "spec": {"unschedulable": True, "taints": [taint]}}
    cluster.create(NODES, body, manager="contract")
    room = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    status = {"status": {"capacity": room, "allocatable": room}}
    cluster.patch(NODES, node, status, manager="contract", subresource="status")
    try:
        _wait_for_crd(cluster)
        _wait_for_account(cluster)
        yield World(api, namespace, node, is_real=is_real)
    finally:
        for pod in cluster.list(PODS).items:
            _gone(cluster, PODS, pod["metadata"]["name"], 0)
        _gone(cluster, NAMESPACES, namespace)
        _gone(cluster, NODES, node)


def _wait_for_crd(cluster: Cluster) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            cluster.list(Kind("keystage.dev/v1", "functions"))
        except NotFound:
            assert time.monotonic() < end, "the custom resource is not served"
            time.sleep(0.1)
        else:
            return


def _wait_for_account(cluster: Cluster) -> None:
    end = time.monotonic() + 20
    while not cluster.list(Kind("v1", "serviceaccounts")).items:
        assert time.monotonic() < end, "the namespace has no default service account"
        time.sleep(0.1)


def _gone(cluster: Cluster, kind: Kind, name: str, grace_s: int | None = None) -> None:
    try:
        cluster.delete(kind, name, grace_s=grace_s)
    except (NotFound, ClusterError):
        return


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.e2e)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each test runs over the fake; with `-m e2e` and KUBECONFIG over the real API server."""
    yield from fake_world() if request.param == "fake" else real_world()

"""A fake Kubernetes cluster for tests: real HTTP, faithful to a real API server where Keystage needs it.

In a test module:

    from support.kube.fixtures import kube  # noqa: F401  (a pytest fixture)

    def test_it(kube: Kube) -> None:
        kube.nodes.add("node1", cpu="4")             # also taint, cordon, label, offer, lose, remove
        cluster = kube.cluster()                     # client.Cluster of the functions' namespace
        cluster = kube.cluster(SYSTEM_NAMESPACE, "keystage-controller")  # as an account, bound by RBAC
        client = kube.api_client()                   # official ApiClient, may do everything
        path = kube.kubeconfig(tmp_path / "config")  # for child processes of the official client

Without pytest: `kube = Kube(); kube.start(); ...; kube.stop()` (`support.kube.cluster`).

Objects directly (no HTTP, no rights): `kube.get("pods", "x")`, `kube.list("functions")`, `kube.patch(...)`,
`kube.delete(...)`, `kube.load(*manifests)`. `kube.until(lambda: ..., what="...")` waits for a change.

Nodes are played. By hand:

    kube.kubelet.ready("pod-name")           # bound, running, ready, with an address of 127.0.0.0/8:
    kube.kubelet.ready(pod, ip="127.77.0.5") # serve there, on port 8080, what the pod would serve
    kube.kubelet.run / unready / waiting(pod, "ImagePullBackOff") / fail / succeed / crash / evict
    kube.kubelet.ended(pod)                  # a deleted pod is gone only when its kubelet says so
    kube.kubelet.resize(pod, "done" | "in-progress" | "deferred" | "infeasible")
    kube.kubelet.log(pod, "a line")
    kube.metrics.use("namespace", "pod", "250m", "64Mi")  # there is no metrics server before
    kube.scheduler.schedule()                # one pass: affinity, taints, room; says why it cannot
    kube.workloads.reconcile()               # one pass: pods of Deployments
    kube.players.step()                      # one pass of all three

or by themselves: `kube.play(start_s=0.05, ready_s=0.1, stop_s=0.05)`; `kube.players.is_ready = lambda pod:
...` is then the readiness probe. What a test set to `waiting`, `crash` or `fail` stays so.

Faults: `kube.faults.fail(times, code=500, verb="patch", resource="pods/resize")`, `.delay(s, times)`,
`.drop_watches()`, `.is_mute = True` (watches say nothing more), `.clear()`; `kube.registry.store.compact()`
(watches from an older version end with 410 Gone); `with kube.outage(): ...` (nobody listens).

Rights: roles and bindings are read from the API (load them from the rendered chart). `kube.access.denied()`
is what was refused, `kube.access.unused("account", "namespace")` what is granted and was never needed.

Not there: TLS and protobuf (so `kubectl` cannot write, and sends no token), admission webhooks, quotas,
server-side dry runs, conversion of versions, `exec`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kube.cluster import FUNCTION_NAMESPACE, SYSTEM_NAMESPACE, Kube

__all__ = ["FUNCTION_NAMESPACE", "SYSTEM_NAMESPACE", "Kube", "kube"]


@pytest.fixture
def kube() -> Iterator[Kube]:
    """A fake cluster without nodes; nothing plays by itself."""
    cluster = Kube()
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()

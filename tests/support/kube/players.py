"""Scheduler, kubelets and workload controllers playing by themselves, in one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from support.kube.answers import Object, Refused
from support.kube.kubelet import Kubelet
from support.kube.registry import Registry
from support.kube.scheduler import Scheduler
from support.kube.subresources import is_ready
from support.kube.workloads import Workloads

_TURN_S = 0.02
_ENDED = ("Succeeded", "Failed")


class Players:
    """Brings pods forward. `step` is one pass; `start` makes passes as long as there is something to do.

    Args:
        registry: the API.
        scheduler: binds pods.
        kubelet: runs them.
        workloads: makes pods of Deployments.
    """

    def __init__(
        self, registry: Registry, scheduler: Scheduler, kubelet: Kubelet, workloads: Workloads
    ) -> None:
        self._registry = registry
        self._scheduler, self._kubelet, self._workloads = scheduler, kubelet, workloads
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._since: dict[tuple[str, str], float] = {}
        self.start_s = 0.0
        """From bound to running."""
        self.ready_s = 0.0
        """From running to ready."""
        self.stop_s = 0.0
        """From deleted to gone."""
        self.is_ready: Callable[[Object], bool] = lambda pod: True
        """Readiness probe of a running pod."""
        self.errors: list[BaseException] = []

    def start(self) -> None:
        """Begins to play by itself."""
        self._thread = threading.Thread(target=self._run, name="fake-players", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends that."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(5)

    def step(self) -> None:
        """One pass: workloads, scheduler, kubelets."""
        self._workloads.reconcile()
        self._scheduler.schedule()
        now = time.monotonic()
        nodes = {n["metadata"]["name"]: n for n in self._registry.list(self._registry.named("nodes"))[1]}
        for pod in self._registry.list(self._registry.named("pods"))[1]:
            node = nodes.get(pod["spec"].get("nodeName", ""))
            if node is not None and is_ready(node):  # a lost node does nothing
                try:
                    self._advance(pod, now)
                except Refused as refused:
                    if refused.code not in (404, 409):
                        raise

    def _advance(self, pod: Object, now: float) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
        if "deletionTimestamp" in pod["metadata"]:
            if self._is_due(uid, "stop", self.stop_s, now):
                self._kubelet.ended(pod)
        elif phase == "Pending" and not _is_waiting(pod):
            if self._is_due(uid, "start", self.start_s, now):
                self._kubelet.run(pod)
        elif phase == "Running" and not _is_waiting(pod):
            wanted = self.is_ready(pod)
            if wanted and not is_ready(pod) and self._is_due(uid, "ready", self.ready_s, now):
                self._kubelet.ready(pod)
            elif not wanted and is_ready(pod):
                self._kubelet.unready(pod)

    def _is_due(self, uid: str, what: str, delay_s: float, now: float) -> bool:
        return now - self._since.setdefault((uid, what), now) >= delay_s

    def _run(self) -> None:
        store = self._registry.store
        while not self._is_over.is_set():
            with store.changed:
                store.changed.wait(timeout=_TURN_S)
            try:
                self.step()
            except BaseException as error:
                self.errors.append(error)
                raise


def _is_waiting(pod: Object) -> bool:
    """Held back by a test: its image cannot be pulled, it crashes."""
    return any("waiting" in s.get("state", {}) for s in pod["status"].get("containerStatuses", ()))

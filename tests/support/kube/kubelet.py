"""Plays the kubelet: what becomes of pods, as their status tells.

Addresses are of 127.0.0.0/8, so that a test's own server can really answer at `podIP:8080`.
"""

from __future__ import annotations

import copy
import os
import threading
from typing import Any, Literal

from support.kube.answers import Object
from support.kube.deletion import confirm
from support.kube.pod_logs import PodLogs
from support.kube.registry import Registry
from support.kube.writes import now_text

Which = Object | str
"""A pod, or its name in the functions' namespace, or `namespace/name`."""
ResizeOutcome = Literal["done", "in-progress", "deferred", "infeasible"]
_KINDS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


class Kubelet:
    """All kubelets.

    Args:
        registry: the API.
        logs: output of pods.
        namespace: of pods that are named without one.
    """

    def __init__(self, registry: Registry, logs: PodLogs, namespace: str) -> None:
        self._registry = registry
        self._logs = logs
        self._namespace = namespace
        self._lock = threading.Lock()
        self._addresses = 0

    def pod(self, which: Which) -> Object:
        """The pod as it is now."""
        if isinstance(which, str):
            namespace, _, name = which.rpartition("/")
            namespace = namespace or self._namespace
        else:
            namespace, name = which["metadata"]["namespace"], which["metadata"]["name"]
        return self._registry.get(self._registry.named("pods"), namespace, name)

    def address(self) -> str:
        """A loopback address that no other pod of this machine's tests has."""
        with self._lock:
            self._addresses += 1
            number = self._addresses
        return f"127.{64 + os.getpid() % 128}.{1 + number // 250 % 250}.{1 + number % 250}"

    def run(self, which: Which, *, ip: str = "") -> Object:
        """Its containers run, and are not ready."""
        return self._running(which, is_ready=False, ip=ip)

    def ready(self, which: Which, *, ip: str = "") -> Object:
        """Its containers run and are ready. A pod that no scheduler bound is bound to `node1`."""
        return self._running(which, is_ready=True, ip=ip)

    def unready(self, which: Which) -> Object:
        """Its readiness probe fails."""
        return self._running(which, is_ready=False)

    def waiting(self, which: Which, reason: str, message: str = "") -> Object:
        """Its containers cannot begin: ImagePullBackOff, CreateContainerConfigError, ..."""
        pod = self._bound(which)
        state = {"waiting": {"reason": reason, "message": message}}
        return self._write(pod, "Pending", pod["status"].get("podIP", ""), state, is_ready=False)

    def fail(self, which: Which, reason: str = "Error", message: str = "", exit_code: int = 1) -> Object:
        """Its containers ended badly and are not begun again."""
        return self._ended(which, "Failed", reason, message, exit_code)

    def succeed(self, which: Which) -> Object:
        """Its containers ended well."""
        return self._ended(which, "Succeeded", "Completed", "", 0)

    def crash(self, which: Which, reason: str = "Error", message: str = "", exit_code: int = 1) -> Object:
        """A container ended and waits to be begun again (restartPolicy Always): CrashLoopBackOff."""
        pod = self._bound(which)
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": f"back-off restarting: {message}"}}
        last = {"terminated": _terminated(reason, message, exit_code)}
        return self._write(
            pod, "Running", pod["status"].get("podIP", ""), state, is_ready=False, last=last, restarts=1
        )

    def evict(self, which: Which, message: str = "The node was low on resource: memory.") -> Object:
        """The kubelet itself ended it."""
        self._ended(which, "Failed", "Evicted", message, 137)
        changes = {"reason": "Evicted", "message": message}
        return self._status(self.pod(which), changes)

    def ended(self, which: Which) -> None:
        """A deleted pod's containers have ended: its phase says so, then it is gone."""
        pod = self.pod(which)
        if pod["status"].get("phase") == "Running":
            pod = self.succeed(pod)
        confirm(self._registry, pod)

    def log(self, which: Which, line: str, *, container: str = "", at_s: float | None = None) -> None:
        """The pod writes a line."""
        self._logs.write(self.pod(which), line, container=container, at_s=at_s)

    def resize(self, which: Which, outcome: ResizeOutcome = "done", message: str = "") -> Object:
        """What becomes of a resize that was asked for."""
        pod = self.pod(which)
        conditions = [
            c for c in pod["status"].get("conditions", ())
            if c["type"] not in ("PodResizePending", "PodResizeInProgress")
        ]  # fmt: skip
        if outcome == "in-progress":
            conditions.append(_condition("PodResizeInProgress", "True", "", message))
        elif outcome != "done":
            conditions.append(_condition("PodResizePending", "True", outcome.capitalize(), message))
        changes: Object = {"conditions": conditions}
        if outcome == "done":
            changes["containerStatuses"] = _with_resources(pod, pod["status"].get("containerStatuses", []))
        changes["observedGeneration"] = pod["metadata"]["generation"]
        return self._status(pod, changes)

    def _bound(self, which: Which) -> Object:
        pod = self.pod(which)
        if not pod["spec"].get("nodeName"):
            from support.kube.subresources import bind

            meta = pod["metadata"]
            bind(self._registry, meta["namespace"], meta["name"], {"target": {"name": "node1"}}, "fake")
            pod = self.pod(which)
        return pod

    def _running(self, which: Which, *, is_ready: bool, ip: str = "") -> Object:
        pod = self._bound(which)
        address = ip or pod["status"].get("podIP") or self.address()
        return self._write(pod, "Running", address, {"running": {"startedAt": now_text()}}, is_ready=is_ready)

    def _ended(self, which: Which, phase: str, reason: str, message: str, exit_code: int) -> Object:
        pod = self._bound(which)
        state = {"terminated": _terminated(reason, message, exit_code)}
        return self._write(pod, phase, pod["status"].get("podIP", ""), state, is_ready=False)

    def _write(
        self,
        pod: Object,
        phase: str,
        ip: str,
        state: Object,
        *,
        is_ready: bool,
        last: Object | None = None,
        restarts: int = 0,
    ) -> Object:
        present = {s["name"]: s for s in pod["status"].get("containerStatuses", ())}
        statuses = [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": f"sha256:{abs(hash(c['image'])):064x}",
                "containerID": f"containerd://{pod['metadata']['uid']}",
                "ready": is_ready,
                "started": "running" in state,
                "restartCount": present.get(c["name"], {}).get("restartCount", 0) + restarts,
                "state": _kept_start(state, present.get(c["name"], {})),
                "lastState": last or present.get(c["name"], {}).get("lastState", {}),
            }
            for c in pod["spec"]["containers"]
        ]
        changes: Object = {
            "phase": phase,
            "containerStatuses": _with_resources(pod, statuses),
            "conditions": _conditions(pod, is_ready=is_ready),
            "observedGeneration": pod["metadata"]["generation"],
        }
        changes["startTime"] = pod["status"].get("startTime") or now_text()
        if ip:
            changes |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "127.0.0.1"}
            changes["hostIPs"] = [{"ip": "127.0.0.1"}]
        return self._status(pod, changes)

    def _status(self, pod: Object, changes: dict[str, Any]) -> Object:
        pods = self._registry.named("pods")
        return self._registry.modify(pods, pod, {"status": changes}, subresource="status", manager="kubelet")


def _kept_start(state: Object, present: Object) -> Object:
    running = present.get("state", {}).get("running")
    return {"running": running} if running and "running" in state else state


def _with_resources(pod: Object, statuses: list[Object]) -> list[Object]:
    wanted = {c["name"]: c.get("resources", {}) for c in pod["spec"]["containers"]}
    result = copy.deepcopy(statuses)
    for status in result:
        resources = wanted.get(status["name"], {})
        status["resources"] = copy.deepcopy(resources)
        if requests := resources.get("requests"):
            status["allocatedResources"] = dict(requests)
    return result


def _terminated(reason: str, message: str, exit_code: int) -> Object:
    now = now_text()
    return {"exitCode": exit_code, "reason": reason, "message": message, "startedAt": now, "finishedAt": now}


def _condition(kind: str, status: str, reason: str = "", message: str = "") -> Object:
    found = {"type": kind, "status": status, "lastTransitionTime": now_text()}
    if reason:
        found["reason"] = reason
    if message:
        found["message"] = message
    return found


def _conditions(pod: Object, *, is_ready: bool) -> list[Object]:
    present = {c["type"]: c for c in pod["status"].get("conditions", ())}
    for kind in _KINDS:
        truth = is_ready if kind in ("Ready", "ContainersReady") else True
        status = "True" if truth else "False"
        if present.get(kind, {}).get("status") != status:
            reason = "" if truth else "ContainersNotReady"
            present[kind] = _condition(kind, status, reason)
    return list(present.values())

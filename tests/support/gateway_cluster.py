"""A Kubernetes cluster for the gateway's tests: the test plays controller and nodes, and runs pods' programs.

Over the fake API server, or the one that KUBECONFIG names; there too pods are what this module says of them.
A function has as many pods as its status desires, one before anybody decided; each runs the process of its
function on an address of its own, so that it can be called where its pod says. It leaves out what a
controller would refine: replicas are not replaced after a redeploy.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
from support.kube.answers import Object
from support.kube.cluster import FUNCTION_NAMESPACE, Kube
from support.kube.contract_world import World, real_world

from keystage.kubernetes.api import FUNCTION_LABEL
from keystage.kubernetes.client import FUNCTIONS, POD_METRICS, PODS
from keystage.kubernetes.errors import ClusterError, ClusterUnavailable, Conflict, NotFound

PORT = 8080
NODE = "node1"
STOP_S = 5.0
_ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
METRICS_CRD: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "pods.metrics.k8s.io"},
    "spec": {
        "group": "metrics.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "PodMetrics", "listKind": "PodMetricsList", "plural": "pods", "singular": "pod"},
        "versions": [
            {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": _ANY}}
        ],
    },
}
"""Stands for a metrics server in the fake."""


class Program:
    """The process of one pod."""

    def __init__(self, pod: Object, command: str, environment: dict[str, str], address: str) -> None:
        self.pod, self.address = pod, address
        argv = shlex.split(command.replace("127.0.0.1", address).replace("$PORT", str(PORT)))
        env = {**os.environ, **environment, "PORT": str(PORT), "KEYSTAGE_REPLICA": pod["metadata"]["name"]}
        self._process = subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._used = (time.monotonic(), self._cpu_s())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode().rstrip("\n"))

    def answers(self) -> bool:
        """Whether it listens."""
        with contextlib.suppress(OSError), socket.create_connection((self.address, PORT), timeout=0.2):
            return True
        return False

    def usage(self) -> tuple[float, int]:
        """Cores since the last call, and bytes now, of it and its children."""
        before_s, before = self._used
        self._used = (time.monotonic(), self._cpu_s())
        held = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                held += process.memory_info().rss
        return max(0.0, self._used[1] - before) / max(1e-3, self._used[0] - before_s), held

    def stop(self) -> None:
        """Ends it and its children."""
        tree = self._tree()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


class PlayedCluster:
    """Plays in a thread between `start` and `stop`.

    Args:
        world: the API server, and a node without a kubelet.
        kube: the fake behind it, None: it is a real one.
    """

    def __init__(self, world: World, kube: Kube | None) -> None:
        self.world = world
        self.kube = kube
        self.cluster = world.cluster
        self.errors: list[BaseException] = []
        self._programs: dict[str, Program] = {}
        self._is_over = threading.Event()
        self._is_paused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="played-cluster")
        self._count = 0

    def start(self) -> None:
        """Begins to play."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it and every program; errors of playing come out here."""
        self._is_over.set()
        self._thread.join()
        for program in self._programs.values():
            program.stop()
        for error in self.errors:
            raise error

    def pause(self) -> None:
        """Leaves everything as it is; the server may be away."""
        self._is_paused.set()

    def go_on(self) -> None:
        """Plays again."""
        self._is_paused.clear()

    def scale(self, name: str, replicas: int) -> None:
        """Decides as the controller does."""
        self.cluster.patch(
            FUNCTIONS, name, {"status": {"desired": replicas}}, manager="t", subresource="status"
        )

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            if self._is_paused.is_set():
                continue
            try:
                self._step()
            except (Conflict, NotFound):
                continue  # somebody was faster
            except BaseException as error:  # noqa: BLE001  (raised by `stop`)
                if isinstance(error, ClusterUnavailable) and self._is_paused.is_set():
                    continue
                self.errors.append(error)
                return

    def _step(self) -> None:
        functions = {obj["metadata"]["name"]: obj for obj in self.cluster.list(FUNCTIONS).items}
        pods = {obj["metadata"]["name"]: obj for obj in self.cluster.list(PODS, labels=FUNCTION_LABEL).items}
        for name, pod in pods.items():
            if pod["metadata"].get("deletionTimestamp"):
                self._end(name)
        living = {name: pod for name, pod in pods.items() if not pod["metadata"].get("deletionTimestamp")}
        for function, obj in functions.items():
            its = sorted(
                n for n, pod in living.items() if pod["metadata"]["labels"][FUNCTION_LABEL] == function
            )
            wanted = obj.get("status", {}).get("desired", 1)
            for name in its[wanted:]:
                self.cluster.delete(PODS, name)
            free = (f"{function}-{n}" for n in range(1000) if f"{function}-{n}" not in pods)
            for _ in range(wanted - len(its)):
                self._begin(obj, next(free))
        for name, program in self._programs.items():
            if name in living:
                self._tell(living[name], program)

    def _begin(self, function: Object, name: str) -> None:
        pod = self.world.pod(name)
        meta = function["metadata"]
        pod["metadata"]["labels"] = {FUNCTION_LABEL: meta["name"]}
        owner = {"apiVersion": function["apiVersion"], "kind": function["kind"], "controller": True}
        pod["metadata"]["ownerReferences"] = [{**owner, "name": meta["name"], "uid": meta["uid"]}]
        self.cluster.create(PODS, pod, manager="t")
        status, _ = self.world.raw("POST", self.world.path(PODS, name, "binding"), self.world.binding(name))
        if status == 404:
            return  # its function was removed meanwhile
        assert status == 201
        self._count += 1
        address = f"127.{2 + os.getpid() % 60}.{1 + os.getpid() // 60 % 250}.{self._count}"
        spec = function["spec"]
        bound = self.cluster.get(PODS, name)
        self._programs[name] = Program(bound, spec["envProcess"], spec.get("envVars", {}), address)
        self._write(name, address, is_ready=False)

    def _tell(self, pod: Object, program: Program) -> None:
        """What the kubelet would: readiness, output, usage."""
        conditions = pod.get("status", {}).get("conditions") or []
        is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        if not is_ready and program.answers():
            self._write(pod["metadata"]["name"], program.address, is_ready=True)
        if self.kube is not None:
            while program.lines:
                self.kube.kubelet.log(pod, program.lines.pop(0))
            self._publish(pod, program)

    def _publish(self, pod: Object, program: Program) -> None:
        cores, held = program.usage()
        usage = {"cpu": f"{round(cores * 1e9)}n", "memory": f"{held >> 10}Ki"}
        meta = {"name": pod["metadata"]["name"], "labels": pod["metadata"]["labels"]}
        body: Object = {"apiVersion": "metrics.k8s.io/v1beta1", "kind": "PodMetrics", "metadata": meta}
        body["containers"] = [{"name": "function", "usage": usage}]
        self.cluster.apply(POD_METRICS, meta["name"], body, manager="t")

    def _write(self, name: str, address: str, *, is_ready: bool) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = "True" if is_ready else "False"
        running: dict[str, Any] = {"running": {"startedAt": now}}
        container = {"name": "function", "image": "none", "imageID": "", "ready": is_ready, "restartCount": 0}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": now}],
            "containerStatuses": [{**container, "state": running}],
        }
        self.cluster.patch(PODS, name, {"status": status}, manager="t", subresource="status")

    def _end(self, name: str) -> None:
        program = self._programs.pop(name, None)
        if program is not None:
            program.stop()
        with contextlib.suppress(NotFound):
            self.cluster.delete(PODS, name, grace_s=0)
        if self.kube is not None:
            with contextlib.suppress(NotFound):
                self.cluster.delete(POD_METRICS, name)


@contextlib.contextmanager
def fake_cluster() -> Iterator[PlayedCluster]:
    """Over the fake API server."""
    kube = Kube()
    kube.start()
    try:
        kube.load(METRICS_CRD)
        kube.nodes.add(NODE)
        with _playing(World(kube.api_client(), FUNCTION_NAMESPACE, NODE, is_real=False), kube) as played:
            yield played
    finally:
        kube.stop()


@contextlib.contextmanager
def real_cluster() -> Iterator[PlayedCluster]:
    """Over the one that KUBECONFIG names; skips without."""
    with contextlib.contextmanager(real_world)() as world, _playing(world, None) as played:
        yield played


@contextlib.contextmanager
def _playing(world: World, kube: Kube | None) -> Iterator[PlayedCluster]:
    played = PlayedCluster(world, kube)
    played.start()
    try:
        yield played
    finally:
        played.stop()
        with contextlib.suppress(ClusterError):
            for obj in played.cluster.list(FUNCTIONS).items:
                played.cluster.delete(FUNCTIONS, obj["metadata"]["name"])

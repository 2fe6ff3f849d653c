"""Nodes that are not there: objects that are kept Ready, and whose pods are played, as KWOK does it.

The real scheduler places on them, the real controller manager believes in them. A pod bound to one becomes
Running and Ready, and goes when it is deleted; parked pods do not get Ready, since nobody can activate them.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Mapping
from typing import Any, Self

from support.e2e_world import FUNCTION_LABEL, World

from keystage.kubernetes.client import LEASES, NODES, PODS, Object
from keystage.kubernetes.errors import ClusterError, Conflict, NotFound

LABEL = "keystage.dev/played"
EVERY_S = 0.3
RENEW_S = 5.0
MANAGER = "e2e-nodes"


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class PlayedNodes:
    """Some nodes, from entering to leaving.

    Args:
        world: the cluster.
        cpu: allocatable cores by name of the node.
        cordoned: names of those that take no pods.
    """

    def __init__(self, world: World, cpu: Mapping[str, str], cordoned: frozenset[str] = frozenset()) -> None:
        self._world, self._cpu, self._cordoned = world, dict(cpu), cordoned
        self._leases = world.system.within("kube-node-lease")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        for name in self._cpu:
            node: Object = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, LABEL: "true"}},
                "spec": {"unschedulable": True} if name in self._cordoned else {},
            }
            self._world.system.create(NODES, node, manager=MANAGER)
            self._status(name)
            lease: Object = {
                "apiVersion": LEASES.version,
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()},
            }
            self._leases.create(LEASES, lease, manager=MANAGER)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._cpu:
            self._world.kubectl("delete", "node", name, "--wait=false", check=False)
        self._stop.set()
        self._thread.join(30)
        for pod in self._pods():
            self._end(pod)
        for name in self._cpu:
            self._world.kubectl(
                "-n", "kube-node-lease", "delete", "lease", name, "--ignore-not-found", check=False
            )

    def _status(self, name: str) -> None:
        resources = {"cpu": self._cpu[name], "memory": "16Gi", "pods": "60", "ephemeral-storage": "50Gi"}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Played",
            "lastHeartbeatTime": _now()[:19] + "Z",
        }
        status = {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [ready],
            "addresses": [{"type": "Hostname", "address": name}],
        }
        self._world.system.patch(NODES, name, {"status": status}, manager=MANAGER, subresource="status")

    def _run(self) -> None:
        since_s = 0.0
        while not self._stop.wait(EVERY_S):
            since_s += EVERY_S
            try:
                if since_s >= RENEW_S:
                    since_s = 0.0
                    for name in self._cpu:
                        self._leases.patch(LEASES, name, {"spec": {"renewTime": _now()}}, manager=MANAGER)
                for pod in self._pods():
                    self._play(pod)
            except ClusterError:
                continue  # an object changed or went meanwhile: the next round sees

    def _pods(self) -> list[Object]:
        both = (self._world.functions, self._world.system)
        return [p for c in both for p in c.list(PODS).items if p["spec"].get("nodeName") in self._cpu]

    def _play(self, pod: Object) -> None:
        meta = pod["metadata"]
        if "deletionTimestamp" in meta:
            self._end(pod)
            return
        is_parked = "keystage.dev/pool" in meta["labels"] and FUNCTION_LABEL not in meta["labels"]
        if pod["status"].get("phase") == "Running":
            return
        flag = "False" if is_parked else "True"
        conditions = [{"type": kind, "status": flag} for kind in ("Ready", "ContainersReady")]
        running = {"running": {"startedAt": _now()[:19] + "Z"}}
        containers = [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": "played",
                "ready": not is_parked,
                "restartCount": 0,
                "state": running,
            }
            for c in pod["spec"]["containers"]
        ]
        status: dict[str, Any] = {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True"}, *conditions],
            "containerStatuses": containers,
            # Nobody listens there: what asks the pod is refused at once.
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
        }
        self._of(pod).patch(PODS, meta["name"], {"status": status}, manager=MANAGER, subresource="status")

    def _end(self, pod: Object) -> None:
        try:
            self._of(pod).delete(PODS, pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_s=0)
        except (NotFound, Conflict):
            return

    def _of(self, pod: Object) -> Any:
        return self._world.system.within(pod["metadata"]["namespace"])

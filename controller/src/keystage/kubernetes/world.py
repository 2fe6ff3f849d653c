"""What the controller sees of a cluster: one informer for each kind of object.

Before it: `client.Cluster`. After it: the platform (`controller.platforms.kubernetes`), `reconciler`,
`keysmanagers` and `gateway_loads` read the same objects, so that they agree. It runs whether or not this
process leads: a new leader has everything at hand. Objects are shared and must not be changed. It must not
interpret them: `view` does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping

from keystage.kubernetes.api import COMPONENT_LABEL, FUNCTION_LABEL, ROLE_LABEL
from keystage.kubernetes.client import DEPLOYMENTS, FUNCTIONS, NODES, PODS, Cluster, Kind, Object
from keystage.kubernetes.informer import WATCH_S, Informer

ALL_PODS = Kind(PODS.version, PODS.plural, is_namespaced=False)
"""Pods of every namespace."""
GATEWAYS = f"{COMPONENT_LABEL}=gateway"
KEYSMANAGERS = f"{COMPONENT_LABEL}=keysmanager"
_NONE: Mapping[str, Object] = {}
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One informer, and whether a view without it is none."""

    informer: Informer
    is_vital: bool


class World:
    """The informers.

    Args:
        cluster: the functions' namespace.
        system: the release's namespace, where gateways and KeysManagers run.
        sees_all_pods: whether pods of other namespaces may be listed; without that right only Keystage's own
            count as taking room on nodes, and the scheduler knows better.
        watch_s: see `informer.WATCH_S`.

    Attributes:
        cluster: as given; so is `system`.
        clock: of the API server.
        sees_all_pods: as given.
    """

    def __init__(
        self, cluster: Cluster, system: Cluster, *, sees_all_pods: bool = True, watch_s: float = WATCH_S
    ) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.system = system
        self.sees_all_pods = sees_all_pods
        self._callbacks: list[Callable[[], None]] = []
        changed = self._changed
        follow = functools.partial(Informer, watch_s=watch_s)
        self._functions = follow(cluster, FUNCTIONS, changed=changed)
        self._pods = follow(cluster, PODS, labels=ROLE_LABEL, changed=changed)
        self._deployments = follow(cluster, DEPLOYMENTS, labels=FUNCTION_LABEL, changed=changed)
        self._nodes = follow(cluster, NODES, changed=changed)
        self._gateways = follow(system, PODS, labels=GATEWAYS, changed=changed)
        self._keysmanagers = follow(system, PODS, labels=KEYSMANAGERS, changed=changed)
        self._others = (
            follow(cluster, ALL_PODS, labels=f"!{ROLE_LABEL}", fields=_RUNNING, changed=_nothing)
            if sees_all_pods
            else None
        )
        self._parts = [
            _Part(informer, is_vital=True)
            for informer in (
                self._functions,
                self._pods,
                self._deployments,
                self._nodes,
                self._gateways,
                self._keysmanagers,
            )
        ]
        if self._others is not None:
            self._parts.append(_Part(self._others, is_vital=False))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Has a callback called, in an informer's thread, after changes; it must not block."""
        self._callbacks.append(callback)

    def start(self) -> None:
        """Begins to follow everything."""
        for part in self._parts:
            part.informer.start()

    def stop(self) -> None:
        """Ends all threads."""
        for part in self._parts:
            part.informer.stop()

    def wait_synced(self, timeout_s: float) -> bool:
        """Waits until everything vital was listed once; False where that took too long."""
        end_s = time.monotonic() + timeout_s
        return all(
            part.informer.wait_synced(max(0.0, end_s - time.monotonic()))
            for part in self._parts
            if part.is_vital
        )

    def is_alive(self) -> bool:
        """Whether everything is still being followed, however well."""
        return all(part.informer.is_alive for part in self._parts)

    def trouble(self) -> str:
        """Why parts of the view cannot be brought up to date now, empty where all can."""
        found = (f"{p.informer.kind.plural}: {p.informer.trouble}" for p in self._parts if p.informer.trouble)
        return "; ".join(dict.fromkeys(found))

    def age_s(self) -> float:
        """Seconds since the oldest vital part was last known to be right; infinite before the first list."""
        return max((part.informer.age_s() for part in self._parts if part.is_vital), default=math.inf)

    def functions_age_s(self) -> float:
        """Seconds since the view of functions was last known to be right."""
        return self._functions.age_s()

    def pods_age_s(self) -> float:
        """The same of functions' pods."""
        return self._pods.age_s()

    def deployments_age_s(self) -> float:
        """The same of Deployments."""
        return self._deployments.age_s()

    def functions(self) -> Mapping[str, Object]:
        """Functions (custom resources) by name."""
        return self._functions.items()

    def pods(self) -> Mapping[str, Object]:
        """Pods with a role in the functions' namespace, parked ones included, by name."""
        return self._pods.items()

    def deployments(self) -> Mapping[str, Object]:
        """Deployments of routers and plain functions, by name."""
        return self._deployments.items()

    def nodes(self) -> Mapping[str, Object]:
        """Nodes by name."""
        return self._nodes.items()

    def gateways(self) -> Mapping[str, Object]:
        """Gateway pods by name."""
        return self._gateways.items()

    def keysmanagers(self) -> Mapping[str, Object]:
        """KeysManager pods by name."""
        return self._keysmanagers.items()

    def others(self) -> Mapping[str, Object]:
        """Pods of all namespaces that are not functions' and have not ended, by `namespace/name`."""
        return self._others.items() if self._others is not None else _NONE

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()


def _nothing() -> None:
    """Room on nodes is read when it is needed."""

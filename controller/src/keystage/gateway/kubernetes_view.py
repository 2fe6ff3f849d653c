"""Who serves which function, from what a cluster holds. Pure.

Before it: informers of functions and pods. After it: `gateway.kubernetes` hands it to routing and REST. Only
what changed is read again. A pod that is deleted, or was chosen to go, leaves the routing here, whatever its
conditions still say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from keystage.gateway.backend import Endpoint, FunctionState
from keystage.kubernetes.view import is_deleted, record_of, replica_of, status_of_object, trouble_of
from keystage.local.api import FunctionRecord, ReplicaRecord

Object = dict[str, Any]
_log = logging.getLogger(__name__)


class KubernetesView:
    """States of all functions, brought up to date by `update`.

    Attributes:
        states: of every function that is deployed, by name.
        pods: of every function, those of removed ones too: those that are not gone, by name.
    """

    def __init__(self) -> None:
        self.states: dict[str, FunctionState] = {}
        self.pods: dict[str, list[Object]] = {}
        self._records: dict[str, tuple[Object, FunctionRecord | None]] = {}
        self._replicas: dict[str, tuple[Object, ReplicaRecord | None]] = {}

    def update(self, functions: Mapping[str, Object], pods: Mapping[str, Object], now_s: float) -> None:
        """Takes what there is now.

        Args:
            functions: custom resources by name.
            pods: pods by name.
            now_s: Unix seconds.
        """
        self._records = {name: self._record(name, obj) for name, obj in functions.items()}
        self._replicas = {name: self._replica(name, obj, now_s) for name, obj in pods.items()}
        by_function: dict[str, list[tuple[Object, ReplicaRecord]]] = {}
        for obj, replica in self._replicas.values():
            if replica is not None:
                by_function.setdefault(replica.function, []).append((obj, replica))
        self.pods = {name: [obj for obj, _ in its] for name, its in by_function.items()}
        self.states = {
            name: _state(obj, record, by_function.get(name, []), now_s)
            for name, (obj, record) in self._records.items()
            if record is not None
        }

    def _record(self, name: str, obj: Object) -> tuple[Object, FunctionRecord | None]:
        known = self._records.get(name)
        if known is not None and known[0] is obj:
            return known
        if is_deleted(obj):
            return obj, None
        try:
            record = record_of(obj)
        except msgspec.ValidationError as error:
            _log.warning("function %s is passed over: its resource does not fit the schema: %s", name, error)
            return obj, None
        # Callers know one namespace, whatever the cluster calls it.
        deployment = msgspec.structs.replace(record.deployment, namespace="")
        return obj, msgspec.structs.replace(record, deployment=deployment)

    def _replica(self, name: str, pod: Object, now_s: float) -> tuple[Object, ReplicaRecord | None]:
        known = self._replicas.get(name)
        return known if known is not None and known[0] is pod else (pod, replica_of(pod, now_s))


def _state(
    obj: Object, record: FunctionRecord, replicas: list[tuple[Object, ReplicaRecord]], now_s: float
) -> FunctionState:
    wanted = record.desired
    if record.override is not None and record.override.expires_at_s > now_s:
        wanted = record.override.replicas
    if wanted is None:
        wanted = sum(replica.state != "draining" for _, replica in replicas)
    ready = [
        Endpoint(replica.replica, replica.address)
        for _, replica in replicas
        if replica.state == "ready" and replica.address
    ]
    told = [*status_of_object(obj).trouble, *trouble_of(pod for pod, _ in replicas)]
    return FunctionState(
        deployment=record.deployment,
        created_at_s=record.created_at_s,
        replicas=wanted,
        ready=tuple(ready),
        waking=record.wake,
        trouble=tuple(dict.fromkeys(told)),
    )

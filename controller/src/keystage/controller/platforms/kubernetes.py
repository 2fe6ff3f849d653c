"""A Kubernetes cluster as a `Platform`: informers, routers by pod address, and wishes for the reconciler.

Before and after it: `loop`. One observation reads what informers, gateways' loads and KeysManagers' statuses
hold in memory, and every router's statistics (in parallel, each with a short bound); `kubernetes_view` makes
the snapshot of it. A view that grew old is a `PlatformError`: numbers are held. What the policy decides goes
into `Wishes`, and counts as decided in the next observation, before the reconciler has written it to the
cluster. It holds no policy and writes nothing itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, assert_never

import msgspec

from keystage.bundle.api import Pipeline
from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
    Site,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.platforms.kubernetes_room import Ground, Need
from keystage.controller.platforms.kubernetes_view import Sight, cluster_snapshot, is_parked, needs_of
from keystage.controller.platforms.local_cpu import Work
from keystage.controller.platforms.local_view import stage_of
from keystage.controller.platforms.router_stats import RouterReader
from keystage.keysmanager.api import NodeStatus
from keystage.kubernetes.gateway_loads import Loads
from keystage.kubernetes.gather import lost_of
from keystage.kubernetes.resize import Capped
from keystage.kubernetes.room import rooms_of
from keystage.kubernetes.view import record_of, replica_of
from keystage.kubernetes.wishes import Wish, Wishes
from keystage.kubernetes.world import World
from keystage.local.api import Deployment, FunctionRecord, ReplicaRecord

Object = Mapping[str, Any]

STALE_S = 30.0
"""Twice the age that a view of a well cluster reaches (`informer.WATCH_S`): older, numbers are held."""
log = logging.getLogger(__name__)


class Loading(Protocol):
    """What gateways have in hand (`kubernetes.gateway_loads.GatewayLoads`)."""

    def now(self) -> Loads:
        """What is known now."""


class Described(Protocol):
    """What bundles say (`platforms.bundles.Bundles`)."""

    def read(self, urls: Sequence[str]) -> tuple[Mapping[str, Pipeline], Mapping[str, Sequence[Work | None]]]:
        """pipeline.json and CPU fits by address, of those that can be read now."""


class KubernetesPlatform:
    """Functions and replicas of a cluster.

    Args:
        world: the informers.
        wishes: where decisions go.
        loads: gateways' loads.
        statuses: says what KeysManagers tell, by node.
        capped: says which functions cannot have more cores now.
        bundles: descriptions of bundles.
        default_requests: of stages that state no resources (`manifests.Settings.requests`).
        beside_vendor: GPUs of nodes where the vendor's plugin hands them out as well are used all the same.
        timeout_s: bound of one exchange with a router, in seconds.
        budget_replicas: R_total, None for no bound: the nodes bound.
        stale_s: see `STALE_S`.

    Attributes:
        looked_at_s: `time.monotonic` of the last observation's begin.
    """

    def __init__(
        self,
        world: World,
        wishes: Wishes,
        loads: Loading,
        statuses: Callable[[], Mapping[str, NodeStatus]],
        capped: Callable[[], Mapping[str, Capped]],
        bundles: Described,
        *,
        default_requests: Mapping[str, str],
        beside_vendor: bool = False,
        timeout_s: float = 0.5,
        budget_replicas: int | None = None,
        stale_s: float = STALE_S,
    ) -> None:
        self._world = world
        self._wishes = wishes
        self._loads = loads
        self._statuses = statuses
        self._capped = capped
        self._bundles = bundles
        self._default_requests = dict(default_requests)
        self._beside_vendor = beside_vendor
        self._budget = budget_replicas
        self._stale_s = stale_s
        self._at_s = 0.0
        self._routers = RouterReader(timeout_s)
        self._ground = Ground({})
        self._seen: tuple[object, object, object] | None = None
        self._records: dict[str, tuple[Object, bool, ReplicaRecord | None]] = {}
        self._needs: Mapping[str, Need] = {}
        self._unreadable: frozenset[str] = frozenset()
        self._sizes: Mapping[str, tuple[int, ...]] = {}
        self.looked_at_s = time.monotonic()

    def close(self) -> None:
        """Ends its threads."""
        self._routers.close()

    def observe(self) -> Snapshot:
        """See `Platform.observe`."""
        self.looked_at_s = time.monotonic()
        self._check()
        self._at_s = at_s = max(self._at_s, self._world.clock.now_s())  # it never steps back
        pods, nodes = self._world.pods(), self._world.nodes()
        loads = self._loads.now()
        functions = self._functions(loads)
        lost = lost_of(nodes.values(), at_s)
        replicas = self._replicas(pods, at_s, lost)
        stats, unread = self._routers.read(functions, replicas)
        bundles, work = self._bundles.read(
            sorted({f.deployment.envVars.get("KEYSTAGE_BUNDLE", "") for f in functions} - {""})
        )
        self._sizes = {url: tuple(s.nbytes for s in bundle.stages) for url, bundle in bundles.items()}
        sight = Sight(
            at_s=at_s,
            functions=functions,
            replicas=replicas,
            pods=pods,
            stats=stats,
            unread=unread,
            unheard=sorted(loads.unread),
            bundles=bundles,
            cpu_work=work,
            ground=self._look_around(nodes, pods),
            statuses=self._statuses(),
            capped=frozenset(self._capped()),
            default_requests=self._default_requests,
            budget_replicas=self._budget,
        )
        self._needs = needs_of(sight)
        return cluster_snapshot(sight, self._needs)

    def apply(self, actions: Sequence[Action]) -> None:
        """See `Platform.apply`."""
        self._check()
        for action in actions:
            match action:
                case SetReplicas(function, replicas, sites, victims):
                    kept = self._fitting(function, sites)
                    self._wishes.set_replicas(function, replicas, kept, victims, self._world.clock.now_s())
                case SetCpu(function, cores):
                    self._wishes.set_cores(function, cores)
                case LiftOverride(function):
                    self._wishes.lift_override(function)
                case ClearWake(function):
                    self._wishes.clear_wake(function)
                case PublishKeyStages(pipeline, ranking):
                    self._wishes.key_stages(pipeline, [entry.stage for entry in ranking])
                case _:
                    assert_never(action)

    def parameter_bytes(self, deployment: Deployment) -> int | None:
        """Size of a stage's parameters, 0: its bundle does not tell; None: that could not be read yet.

        A pod's GPU memory depends on it, and a pod with another size is another pod: who makes pods waits.
        """
        bundle = deployment.envVars.get("KEYSTAGE_BUNDLE", "")
        if bundle and bundle not in self._sizes:
            return None
        index = stage_of(FunctionRecord(deployment=deployment, created_at_s=0.0))
        sizes = self._sizes.get(bundle, ())
        return sizes[index] if index is not None and index < len(sizes) else 0

    def _check(self) -> None:
        age_s = self._world.age_s()
        if age_s > self._stale_s:
            raise PlatformError(
                f"the cluster was seen {age_s:.0f} s ago last, at most {self._stale_s:g} s are trusted"
            )

    def _functions(self, loads: Loads) -> list[FunctionRecord]:
        """Functions as they are to be seen, by name; one that cannot be read is said once and left out."""
        wishes = self._wishes.read().functions
        found: list[FunctionRecord] = []
        unreadable: set[str] = set()
        for name, obj in sorted(self._world.functions().items()):
            if obj["metadata"].get("deletionTimestamp"):
                continue
            try:
                record = record_of(obj)
            except msgspec.ValidationError as error:
                unreadable.add(name)
                if name not in self._unreadable:
                    log.warning("function %s cannot be read: %s", name, error)
                continue
            record = msgspec.structs.replace(record, loads=loads.by_function.get(name, ()))
            found.append(as_decided(record, wishes.get(name), obj["metadata"].get("uid", "")))
        self._unreadable = frozenset(unreadable)
        return found

    def _replicas(self, pods: Mapping[str, Object], at_s: float, lost: frozenset[str]) -> list[ReplicaRecord]:
        """Functions' pods as records; of a pod that is the same object as before it is the same."""
        records = {}
        for name, pod in pods.items():
            is_lost = pod.get("spec", {}).get("nodeName", "") in lost
            known = self._records.get(name)
            if known is not None and known[0] is pod and known[1] == is_lost:
                records[name] = known
            else:
                records[name] = (pod, is_lost, replica_of(pod, at_s, lost))
        self._records = records
        return [record for _, _, record in records.values() if record is not None]

    def _look_around(self, nodes: Mapping[str, Object], pods: Mapping[str, Object]) -> Ground:
        """The nodes; counted anew only where a view changed, which then is another object."""
        others = self._world.others()
        seen = (nodes, pods, others)
        if self._seen is None or any(old is not new for old, new in zip(self._seen, seen, strict=True)):
            taking = [pod for pod in pods.values() if not is_parked(pod)]
            rooms = rooms_of(nodes.values(), [*taking, *others.values()])
            self._ground, self._seen = Ground(rooms, self._beside_vendor), seen
        return self._ground

    def _fitting(self, function: str, sites: Sequence[Site]) -> tuple[Site, ...]:
        need = self._needs.get(function)
        if need is None:
            return tuple(sites)
        kept = self._ground.fitting(need, sites)
        if len(kept) < len(sites):
            log.info(
                "%d of %d places for %s are left to the scheduler",
                len(sites) - len(kept),
                len(sites),
                function,
            )
        return kept


def as_decided(record: FunctionRecord, wish: Wish | None, uid: str) -> FunctionRecord:
    """A function with what was decided and is not written to the cluster yet.

    Args:
        record: as the cluster shows it.
        wish: what was decided, None: nothing.
        uid: of its custom resource; a wish about one of before does not count.
    """
    if wish is None or wish.uid not in ("", uid):
        return record
    return msgspec.structs.replace(
        record,
        desired=record.desired if wish.replicas is None else wish.replicas,
        cores=record.cores if wish.cores is None else wish.cores,
        override=None if wish.is_lifting else record.override,
        wake=record.wake and not wish.is_awake,
    )

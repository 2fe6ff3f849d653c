"""From what a cluster shows to a snapshot. Pure.

Before it: `platforms.kubernetes` has read informers, routers, gateways and KeysManagers. After it: `decide`.
It makes the same records that a supervisor tells, leaves the rest to `local_view`, and puts in what only a
cluster has: nodes with GPUs, places, caps by what the nodes hold, cores within the nodes' room, and gateways
that could not be read (their loads are missing, which holds a plain function's number).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from keystage.bundle.api import Pipeline, StageSpec
from keystage.controller.domain.snapshot import (
    CpuView,
    FunctionView,
    GatewayLoad,
    PipelineView,
    Placed,
    Snapshot,
    StageView,
)
from keystage.controller.platforms.kubernetes_cpu import Spot, cluster_cpu_views
from keystage.controller.platforms.kubernetes_room import Ground, Need, node_views
from keystage.controller.platforms.local_cap import is_on_gpu
from keystage.controller.platforms.local_cpu import Cores, Work
from keystage.controller.platforms.local_device import device_of, is_on_cpu
from keystage.controller.platforms.local_nodes import stage_name, times_by_source
from keystage.controller.platforms.local_view import Seen, pipeline_of, role_of, snapshot_of, stage_of
from keystage.controller.policy.placement_cost import ASSUMED_CORES
from keystage.keysmanager.api import NodeStatus
from keystage.kubernetes.api import FUNCTION_LABEL, POOL_LABEL
from keystage.kubernetes.cores import base_cores, cores_in, cpu_of, deployed_resources, given_to
from keystage.kubernetes.manifests import gpu_gib_of
from keystage.kubernetes.manifests_parts import node_selector
from keystage.kubernetes.manifests_pod import gpu_of_pod
from keystage.kubernetes.room import need_of
from keystage.kubernetes.view import is_ended, labels_of
from keystage.local.api import FunctionRecord, ReplicaRecord
from keystage.router.api import RouterStats

Object = Mapping[str, Any]
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Everything read in one observation.

    Attributes:
        at_s: steady Unix seconds.
        functions: as they are to be seen: what was decided and is not written yet counts.
        replicas: function's pods as records.
        pods: all pods in the functions' namespace, by name.
        stats: statistics of every router that answered, by router function.
        unread: why a router function's statistics are missing.
        unheard: gateways whose loads are missing.
        bundles: pipeline.json by address.
        cpu_work: fits of the bundles' CPU profiles per stage, by address.
        ground: the nodes.
        statuses: what KeysManagers tell, by node.
        capped: functions whose last resize turned out to be infeasible.
        default_requests: of stages that state no resources.
        budget_replicas: R_total, None for no bound.
    """

    at_s: float
    functions: Sequence[FunctionRecord]
    replicas: Sequence[ReplicaRecord]
    pods: Mapping[str, Object]
    stats: Mapping[str, Sequence[RouterStats]]
    unread: Mapping[str, str]
    unheard: Sequence[str] = ()
    bundles: Mapping[str, Pipeline] = dataclasses.field(default_factory=dict)
    cpu_work: Mapping[str, Sequence[Work | None]] = dataclasses.field(default_factory=dict)
    ground: Ground = Ground({})  # noqa: RUF009  (frozen)
    statuses: Mapping[str, NodeStatus] = dataclasses.field(default_factory=dict)
    capped: frozenset[str] = frozenset()
    default_requests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    budget_replicas: int | None = None


def needs_of(sight: Sight) -> dict[str, Need]:
    """What a replica of each stage takes of its node, by function."""
    found = {}
    for record in sight.functions:
        if role_of(record) != "stage":
            continue
        deployment = record.deployment
        spec = _spec_of(sight, record)
        found[deployment.service] = Need(
            resources=need_of(deployed_resources(deployment, sight.default_requests)),
            gpu_gib=gpu_gib_of(deployment, spec.nbytes if spec is not None else 0),
            cores=base_cores(deployment) if _has_cores(sight, record) else ASSUMED_CORES,
            selector=node_selector(deployment),
        )
    return found


def cluster_snapshot(sight: Sight, needs: Mapping[str, Need]) -> Snapshot:
    """Builds the snapshot.

    Args:
        sight: what was read.
        needs: see `needs_of`.
    """
    seen = snapshot_of(
        Seen(
            at_s=sight.at_s,
            functions=sight.functions,
            replicas=sight.replicas,
            stats=sight.stats,
            unread=sight.unread,
            bundles=sight.bundles,
            machine=None,
            budget_replicas=sight.budget_replicas,
            tells_load=True,
        )
    )
    held = held_gpus(sight.pods.values())
    names = {name: f.deployment.service for f in sight.functions if (name := stage_name(f)) is not None}
    cpu = _cpu_views(sight)
    return msgspec.structs.replace(
        seen,
        functions=tuple(_heard(sight, view) for view in seen.functions),
        pipelines=tuple(_pipeline(sight, view, needs, cpu) for view in seen.pipelines),
        nodes=node_views(sight.ground, needs, held, sight.statuses, names),
    )


def held_gpus(pods: Iterable[Object]) -> Counter[tuple[str, int]]:
    """Replicas that hold a GPU, by node and index; parked pods do not: they are there to become replicas."""
    held: Counter[tuple[str, int]] = Counter()
    for pod in pods:
        gpu, node = gpu_of_pod(pod), pod.get("spec", {}).get("nodeName")
        if gpu is not None and node and not is_parked(pod) and not is_ended(pod):
            held[node, gpu[0]] += 1
    return held


def is_parked(pod: Object) -> bool:
    """Whether a pod waits to become a replica."""
    labels = labels_of(pod)
    return POOL_LABEL in labels and not labels.get(FUNCTION_LABEL)


def _pipeline(
    sight: Sight, view: PipelineView, needs: Mapping[str, Need], cpu: Mapping[str, CpuView]
) -> PipelineView:
    return msgspec.structs.replace(
        view, stages=tuple(_stage(sight, stage, needs[stage.scale.function], cpu) for stage in view.stages)
    )


def _stage(sight: Sight, view: StageView, need: Need, cpu: Mapping[str, CpuView]) -> StageView:
    function = view.scale.function
    mine = [r for r in sight.replicas if r.function == function and r.state in ("starting", "ready")]
    placed = tuple(
        Placed(r.replica, r.node, gpus=_gpus(sight, r), is_ready=r.state == "ready") for r in mine if r.node
    )
    cap, reason = sight.ground.cap(need, len(placed))
    record = next(f for f in sight.functions if f.deployment.service == function)
    spec = _spec_of(sight, record)
    return msgspec.structs.replace(
        view,
        scale=msgspec.structs.replace(view.scale, placed=placed, cap=cap, cap_reason=reason),
        starts=times_by_source(mine),
        cpu=cpu.get(function),
        gpus=1 if need.gpu_gib else 0,
        gpu_bytes=need.gpu_gib * GIB,
        parameter_bytes=spec.nbytes if spec is not None else 0,
    )


def _gpus(sight: Sight, replica: ReplicaRecord) -> tuple[int, ...]:
    gpu = gpu_of_pod(sight.pods.get(replica.replica, {}))
    return (gpu[0],) if gpu is not None else ()


def _heard(sight: Sight, view: FunctionView) -> FunctionView:
    """Adds gateways that may have anything in hand for it: they were not read."""
    if view.loads is None or not sight.unheard:
        return view
    missing = tuple(GatewayLoad(name) for name in sight.unheard)
    return msgspec.structs.replace(view, loads=(*view.loads, *missing))


def _spec_of(sight: Sight, record: FunctionRecord) -> StageSpec | None:
    """A stage's entry in pipeline.json, where that could be read."""
    bundle = sight.bundles.get(record.deployment.envVars.get("KEYSTAGE_BUNDLE", ""))
    index = stage_of(record)
    return bundle.stages[index] if bundle and index is not None and index < len(bundle.stages) else None


def _work_of(sight: Sight, record: FunctionRecord) -> Work | None:
    """What more cores are worth to a stage by its bundle's profile, None where nothing is known."""
    fits = sight.cpu_work.get(record.deployment.envVars.get("KEYSTAGE_BUNDLE", ""), ())
    index = stage_of(record)
    return fits[index] if index is not None and index < len(fits) else None


def _has_cores(sight: Sight, record: FunctionRecord) -> bool:
    """Whether its replicas' cores are of interest: it computes on them, or is said to gain by them.

    A pod's cores are set whatever it does with them; a stage that uses a GPU is left as it was deployed.
    """
    return is_on_cpu(record) or (not is_on_gpu(device_of(record)) and _work_of(sight, record) is not None)


def _cpu_views(sight: Sight) -> dict[str, CpuView]:
    """Cores of every stage where they matter, by function."""
    stages: dict[str, Cores] = {}
    spots: dict[str, Spot] = {}
    for record in sight.functions:
        index = stage_of(record)
        if role_of(record) != "stage" or index is None or not _has_cores(sight, record):
            continue
        deployment = record.deployment
        name, base = deployment.service, base_cores(deployment)
        deployed = deployed_resources(deployment, sight.default_requests)
        mine = [
            r for r in sight.replicas if r.function == name and r.state in ("starting", "ready") and r.node
        ]
        have = [
            cores
            for r in mine
            if (cores := cores_in(given_to(sight.pods.get(r.replica, {})), deployed, base)) is not None
        ]
        counters = (c for s in sight.stats.get(pipeline_of(record), ()) for c in s.stages)
        stages[name] = Cores(
            now=min(have, default=record.cores if record.cores is not None else base),
            base=base,
            running=len(mine),
            queue=sum(c.queue for c in counters if c.stage == index),
            work=_work_of(sight, record),
        )
        spots[name] = Spot(
            on=Counter(r.node for r in mine),
            request=cpu_of(deployed)[0] / base if base > 0 else 0.0,
            is_capped=name in sight.capped,
        )
    return cluster_cpu_views(sight.ground.rooms, stages, spots)

"""Nodes of a local world in the snapshot, where it plays several. Pure.

Before it: the supervisor's node and replica records. After it: `local_view` puts them into the snapshot,
and the policy names sites. One node is no choice: then the snapshot has none.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from keystage.controller.domain.snapshot import GpuView, NodeView, Placed, StartTimes
from keystage.controller.platforms.local_device import is_on_cpu, threads_of
from keystage.keysmanager.api import NodeStatus
from keystage.local.api import FunctionRecord, NodeRecord, ReplicaRecord
from keystage.local.key_stages import MAX_DIGITS

_KINDS = {"gpu": "gpu_s", "peer-gpu": "gpu_s", "memory": "memory_s", "disk": "disk_s"}
"""Fields of `StartTimes` by source; parameters from elsewhere, or read by the replica itself: `remote_s`."""


def placed(nodes: Sequence[NodeRecord], replicas: Sequence[ReplicaRecord]) -> tuple[Placed, ...]:
    """Where a function's replicas run; empty on one node."""
    if len(nodes) < 2:
        return ()
    running = (r for r in replicas if r.state in ("starting", "ready"))
    return tuple(Placed(r.replica, r.node, is_ready=r.state == "ready") for r in running)


def node_views(
    nodes: Sequence[NodeRecord], functions: Sequence[FunctionRecord], replicas: Sequence[ReplicaRecord]
) -> tuple[NodeView, ...]:
    """Nodes with what is free on them and whose parameters they hold; empty on one node."""
    if len(nodes) < 2:
        return ()
    return _views(nodes, functions, replicas)


def shown_views(
    nodes: Sequence[NodeRecord], functions: Sequence[FunctionRecord], replicas: Sequence[ReplicaRecord]
) -> tuple[NodeView, ...]:
    """The same for people, one node and GPUs included; empty where `node_views` tells them all there is."""
    if len(nodes) > 1 and not any(node.status is not None and node.status.gpus for node in nodes):
        return ()
    return tuple(
        msgspec.structs.replace(view, gpus=_gpus(node.status))
        for view, node in zip(_views(nodes, functions, replicas), nodes, strict=True)
    )


def _gpus(status: NodeStatus | None) -> tuple[GpuView, ...]:
    gpus = sorted(status.gpus, key=lambda gpu: gpu.index) if status is not None else ()
    return tuple(GpuView(gpu.total_bytes, gpu.free_bytes) for gpu in gpus)


def _views(
    nodes: Sequence[NodeRecord], functions: Sequence[FunctionRecord], replicas: Sequence[ReplicaRecord]
) -> tuple[NodeView, ...]:
    threads = {f.deployment.service: threads_of(f) for f in functions if is_on_cpu(f)}
    used: Counter[str] = Counter()
    for replica in replicas:
        if replica.state in ("starting", "ready"):
            used[replica.node] += threads.get(replica.function, 0)
    stages = {name: f.deployment.service for f in functions if (name := stage_name(f)) is not None}
    return tuple(
        NodeView(
            node=node.node,
            cores_free=max(0.0, node.cores - used[node.node]),
            memory_free_bytes=free_bytes(node.status),
            in_memory=in_memory(node.status, stages),
        )
        for node in nodes
    )


def start_times(nodes: Sequence[NodeRecord], replicas: Sequence[ReplicaRecord]) -> StartTimes | None:
    """Median seconds from start to ready of a function's ready replicas by where parameters came from.

    None on one node, or where nothing was measured; then the policy takes every node for equal.
    """
    if len(nodes) < 2:
        return None
    return times_by_source(replicas)


def times_by_source(replicas: Sequence[ReplicaRecord]) -> StartTimes | None:
    """The same wherever they are: None where nothing was measured."""
    times_s: dict[str, list[float]] = {}
    for replica in replicas:
        if replica.state == "ready" and replica.ready_at_s >= replica.started_at_s > 0:
            kind = _KINDS.get(replica.source, "remote_s")
            times_s.setdefault(kind, []).append(replica.ready_at_s - replica.started_at_s)
    return StartTimes(**{kind: statistics.median(s) for kind, s in times_s.items()}) if times_s else None


def free_bytes(status: NodeStatus | None) -> int:
    """Host memory that may still hold parameters, 0 where nobody tells."""
    if status is None:
        return 0
    return max(0, status.memory.budget_bytes - status.memory.used_bytes)


def stage_name(record: FunctionRecord) -> tuple[str, int] | None:
    """Pipeline and (first) stage as a KeysManager names them; None for what is no stage."""
    env = record.deployment.envVars
    first = env.get("KEYSTAGE_STAGES", "").partition("-")[0]
    is_index = first.isdecimal() and len(first) <= MAX_DIGITS
    return (env.get("KEYSTAGE_PIPELINE", ""), int(first)) if is_index else None


def in_memory(status: NodeStatus | None, stages: Mapping[tuple[str, int], str]) -> frozenset[str]:
    """Functions whose parameters a ready holder has."""
    if status is None:
        return frozenset()
    held = ((h.pipeline, h.stage) for h in status.holders if h.state == "ready")
    return frozenset(stages[key] for key in held if key in stages)

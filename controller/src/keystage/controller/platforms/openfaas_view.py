"""From what a stock gateway tells to a snapshot. Pure.

Before it: `platforms.openfaas` has fetched functions and statistics. After it: `decide`. It makes the same
records that a supervisor tells and leaves the rest to `local_view`; then it puts in what the gateway takes:
the fewest and the most replicas. A supervisor's replicas have names; these are numbered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keystage.controller.domain.snapshot import FunctionView, Snapshot
from keystage.controller.platforms.local_view import Seen, snapshot_of
from keystage.controller.platforms.openfaas_memory import Memory, Starts, wanted
from keystage.local.api import Deployment, FunctionRecord, ReplicaRecord, ReplicaState
from keystage.openfaas.provider import Limits
from keystage.openfaas.types import FunctionStatus
from keystage.router.api import RouterStats


def gateway_snapshot(
    at_s: float,
    statuses: Sequence[FunctionStatus],
    memory: Memory,
    limits: Limits,
    *,
    stats: Mapping[str, Sequence[RouterStats]],
    unread: Mapping[str, str],
    budget_replicas: int | None = None,
) -> Snapshot:
    """Builds the snapshot.

    Args:
        at_s: steady Unix seconds.
        statuses: the gateway's functions.
        memory: what was stated and missed before, this observation included.
        limits: what the gateway takes.
        stats: statistics of every router that answered, by router function.
        unread: why a router function's statistics are missing.
        budget_replicas: R_total, None for no bound.
    """
    seen = snapshot_of(
        Seen(
            at_s=at_s,
            functions=[record_of(status, wanted(memory, status, at_s)) for status in statuses],
            replicas=[
                replica
                for status in statuses
                for replica in replicas_of(status, memory.starts.get(status.name, Starts()), at_s)
            ],
            stats=stats,
            unread=unread,
            bundles={},
            machine=None,
            budget_replicas=budget_replicas,
        )
    )
    return msgspec.structs.replace(
        seen,
        functions=tuple(_bounded(view, limits) for view in seen.functions),
        pipelines=tuple(
            msgspec.structs.replace(
                pipeline,
                stages=tuple(
                    msgspec.structs.replace(stage, scale=_bounded(stage.scale, limits))
                    for stage in pipeline.stages
                ),
            )
            for pipeline in seen.pipelines
        ),
    )


def record_of(status: FunctionStatus, replicas: int) -> FunctionRecord:
    """A function as a supervisor would tell it."""
    return FunctionRecord(
        deployment=Deployment(
            service=status.name,
            image=status.image,
            namespace=status.namespace,
            envProcess=status.envProcess,
            envVars=status.envVars,
            constraints=status.constraints,
            secrets=status.secrets,
            labels=status.labels,
            annotations=status.annotations,
            limits=status.limits or None,
            requests=status.requests or None,
            readOnlyRootFilesystem=status.readOnlyRootFilesystem,
        ),
        created_at_s=0.0,
        desired=replicas,
    )


def replicas_of(status: FunctionStatus, starts: Starts, at_s: float) -> list[ReplicaRecord]:
    """Numbered replicas: the ready ones (the first few with measured start times), then the missing ones."""
    ready = [
        _replica(status.name, number, "ready", at_s - took_s, at_s)
        for number, took_s in enumerate(starts.took_s[: status.availableReplicas])
    ]
    ready += [
        _replica(status.name, number, "ready", 0.0, 0.0)
        for number in range(len(ready), status.availableReplicas)
    ]
    return ready + [
        _replica(status.name, len(ready) + number, "starting", began_s, 0.0)
        for number, began_s in enumerate(starts.began_s)
    ]


def _replica(
    function: str, number: int, state: ReplicaState, started_at_s: float, ready_at_s: float
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=f"{function}#{number}",
        function=function,
        generation=1,
        state=state,
        pid=0,
        address="",
        started_at_s=started_at_s,
        ready_at_s=ready_at_s,
    )


def _bounded(view: FunctionView, limits: Limits) -> FunctionView:
    """Puts in the gateway's own bounds where they are the narrower ones."""
    if limits.least > 0:
        view = msgspec.structs.replace(view, zero_after_s=None)  # it never is at zero there
    least = max(view.min_replicas, limits.least)
    if limits.most is None or view.max_replicas <= limits.most:
        return msgspec.structs.replace(view, min_replicas=least)
    reason = f"{limits.name} takes at most {limits.most} replicas of a function"
    return msgspec.structs.replace(
        view, min_replicas=min(least, limits.most), cap=limits.most, cap_reason=reason
    )

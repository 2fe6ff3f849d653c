"""From function and replica records and the routers' statistics to a snapshot. Pure.

Before it: `platforms.local` has fetched the records, or `platforms.openfaas_view` has made them of what a
stock gateway tells. After it: `decide`. A function's role, pipeline
and stages are read from its environment (`KEYSTAGE_ROLE`, ...), else from its labels. A stage
function that hosts a range of stages counts as its first stage: it is one unit of scaling.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from keystage.bundle.api import Pipeline
from keystage.controller.domain.snapshot import (
    Answered,
    Counters,
    CpuView,
    FunctionView,
    GatewayLoad,
    Override,
    PipelineView,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    Starting,
    WorkerSample,
)
from keystage.controller.platforms.local_cap import Machine, cap_of, gpu_cap_of, is_on_gpu
from keystage.controller.platforms.local_cpu import Cores, Work, cpu_views
from keystage.controller.platforms.local_device import batch_of, cores_of, device_of, is_on_cpu, threads_of
from keystage.controller.platforms.local_labels import scaling_of
from keystage.controller.platforms.local_nodes import node_views, placed, shown_views, start_times
from keystage.local import api as local_api
from keystage.local.api import FunctionRecord, NodeRecord, ReplicaRecord
from keystage.router.api import ReplicaStats, RouterStats
from keystage.wire.unreadable import UNREADABLE

DEFAULT_START_S = 2.0
"""Start time assumed for the expected ready time until a replica of the function was measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Everything fetched in one observation.

    Attributes:
        at_s: steady Unix seconds.
        functions: the supervisor's function records.
        replicas: its replica records.
        stats: statistics of every router that answered, by router function.
        unread: why a router function's statistics are missing, by router function.
        bundles: content of pipeline.json by its URL, where it could be read.
        machine: cores and memory, None where replicas run elsewhere: then no caps, no cores.
        cpu_work: fits of the bundles' CPU profiles per stage, by URL.
        budget_replicas: R_total, None for no bound.
        nodes: the supervisor's node records.
        tells_load: whether function records say what gateways have in hand.
    """

    at_s: float
    functions: Sequence[FunctionRecord]
    replicas: Sequence[ReplicaRecord]
    stats: Mapping[str, Sequence[RouterStats]]
    unread: Mapping[str, str]
    bundles: Mapping[str, Pipeline]
    machine: Machine | None
    budget_replicas: int | None = None
    cpu_work: Mapping[str, Sequence[Work | None]] = dataclasses.field(default_factory=dict)
    nodes: Sequence[NodeRecord] = ()
    tells_load: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What the stages of a machine share.

    Attributes:
        threads: of one replica of every CPU stage function together.
        cpu: cores by function.
    """

    threads: int
    cpu: Mapping[str, CpuView]


def role_of(record: FunctionRecord) -> str:
    """`router`, `stage` or `function`."""
    return local_api.role_of(record.deployment)


def pipeline_of(record: FunctionRecord) -> str:
    """The pipeline a router or stage belongs to, empty when it does not say."""
    deployment = record.deployment
    return deployment.envVars.get("KEYSTAGE_PIPELINE") or deployment.labels.get("keystage.pipeline") or ""


def stage_of(record: FunctionRecord) -> int | None:
    """Index of the (first) stage a function hosts, None when it does not say."""
    deployment = record.deployment
    text = deployment.envVars.get("KEYSTAGE_STAGES") or deployment.labels.get("keystage.stage") or ""
    found = re.match(r"\s*(\d{1,6})", text)
    return int(found.group(1)) if found else None


def snapshot_of(seen: Seen) -> Snapshot:
    """Builds the snapshot; functions that claim no pipeline or stage are plain functions."""
    stages: dict[str, list[tuple[int, FunctionRecord]]] = {}
    others = []
    for record in seen.functions:
        index = stage_of(record)
        pipeline = pipeline_of(record)
        if role_of(record) == "stage" and pipeline and index is not None:
            stages.setdefault(pipeline, []).append((index, record))
        else:
            others.append(record)
    routers = {pipeline_of(r): r for r in others if role_of(r) == "router" and pipeline_of(r)}
    machine = Shared(
        threads=sum(threads_of(r) for found in stages.values() for _, r in found if is_on_cpu(r)),
        cpu=_cpu_views(seen, stages),
    )
    return Snapshot(
        at_s=seen.at_s,
        pipelines=tuple(
            _pipeline(seen, name, routers.get(name), sorted(found, key=lambda s: s[0]), machine)
            for name, found in sorted(stages.items())
        ),
        functions=tuple(_scale(seen, record) for record in others),
        budget_replicas=seen.budget_replicas,
        nodes=node_views(seen.nodes, seen.functions, seen.replicas),
        shown=shown_views(seen.nodes, seen.functions, seen.replicas),
    )


def _pipeline(
    seen: Seen,
    name: str,
    router: FunctionRecord | None,
    stages: Sequence[tuple[int, FunctionRecord]],
    machine: Shared,
) -> PipelineView:
    missing = f"pipeline {name} has no router function" if router is None else ""
    stats: Sequence[RouterStats] = ()
    slo, batching = Slo(), ""
    if router is not None:
        function = router.deployment.service
        stats = seen.stats.get(function, ())
        missing = seen.unread.get(function, "")
        if not stats and not missing:
            missing = f"router {function} has no ready replica"
        missing = missing or contradiction(function, stats)
        slo = slo_of(router)
        batching = router.deployment.envVars.get("KEYSTAGE_BATCHING", "")
    kinds = {s.execution for s in stats}
    is_looping = kinds == {"looping"}
    return PipelineView(
        pipeline=name,
        execution="looping" if is_looping else "program" if kinds == {"program"} else "single-pass",
        slo=slo,
        stages=tuple(_stage(seen, index, record, stats, machine, is_looping) for index, record in stages),
        missing=missing,
        batching=batching,
        answered=tuple(Answered(s.incarnation, s.due, s.in_time) for s in stats),
    )


def contradiction(function: str, stats: Sequence[RouterStats]) -> str:
    """Why what a router's replicas say cannot all be so, empty where it can."""
    kinds = sorted({s.execution for s in stats})
    if len(kinds) > 1:
        return f"replicas of router {function} contradict each other: {' and '.join(kinds)}"
    names = [s.incarnation for s in stats]
    if len(set(names)) < len(names):
        return f"two replicas of router {function} call themselves {max(names, key=names.count)}"
    counted = {tuple(sorted(c.stage for c in s.stages)) for s in stats}
    if len(counted) > 1:
        told = " and ".join(str(len(stages)) for stages in sorted(counted))
        return f"replicas of router {function} contradict each other: they count {told} stages"
    return ""


def _stage(
    seen: Seen,
    index: int,
    record: FunctionRecord,
    stats: Sequence[RouterStats],
    machine: Shared,
    is_looping: bool,
) -> StageView:
    scale = _scale(seen, record)
    bundle = seen.bundles.get(record.deployment.envVars.get("KEYSTAGE_BUNDLE", ""))
    spec = bundle.stages[index] if bundle is not None and index < len(bundle.stages) else None
    if seen.machine is None:
        pass  # replicas run elsewhere: what bounds them there is not known here
    elif is_on_cpu(record):
        running = scale.ready + len(scale.starting)
        nbytes = spec.nbytes if spec is not None else 0
        cap, reason = cap_of(seen.machine, threads_of(record), machine.threads, nbytes, running)
        scale = msgspec.structs.replace(scale, cap=cap, cap_reason=reason)
    elif is_on_gpu(device_of(record)):
        cap, reason = gpu_cap_of(seen.machine, device_of(record))
        scale = msgspec.structs.replace(scale, cap=cap, cap_reason=reason)
    batch = batch_of(record, spec)
    return StageView(
        stage=index,
        scale=scale,
        start_s=_start_s(seen, record),
        starts=start_times(seen.nodes, [r for r in seen.replicas if r.function == scale.function]),
        profile_s=batch.alpha_s + batch.beta_s if batch is not None else None,
        routers=tuple(
            RouterSample(incarnation=s.incarnation, at_s=s.at_s, counters=_counters(s, index)) for s in stats
        ),
        workers=_workers(stats, index),
        batch=None if is_looping else batch,  # waves of sessions are no batches of items
        after=_after(bundle, index),
        cpu=machine.cpu.get(scale.function),
    )


def _after(bundle: Pipeline | None, index: int) -> tuple[int, ...] | None:
    """The modules that a stream program's module follows; loops are left out. None: stages are a chain."""
    if bundle is None or bundle.execution != "program":
        return None
    return tuple(sorted({source for source, to in bundle.edges if to == index and source < to}))


def _scale(seen: Seen, record: FunctionRecord) -> FunctionView:
    name, role = record.deployment.service, role_of(record)
    mine = [r for r in seen.replicas if r.function == name]
    draining = tuple(r.replica for r in mine if r.state == "draining")
    if record.desired is None:  # then what runs is taken for what is wanted: those being replaced are not
        mine = [r for r in mine if r.generation == record.generation] or mine
    start_s = _start_s(seen, record) or DEFAULT_START_S
    override = record.override
    asked = scaling_of(record.deployment.labels, role)
    loads = tuple(GatewayLoad(load.gateway, load.in_flight, load.started) for load in record.loads)
    return FunctionView(
        function=name,
        desired=record.desired,
        ready=sum(r.state == "ready" for r in mine),
        starting=tuple(
            Starting(r.replica, min(r.started_at_s, seen.at_s) + start_s)
            for r in mine
            if r.state == "starting"
        ),
        draining=draining,
        min_replicas=asked.min_replicas,
        max_replicas=asked.max_replicas,
        override=Override(override.replicas, override.expires_at_s) if override is not None else None,
        wake=record.wake,
        placed=placed(seen.nodes, mine),
        zero_after_s=asked.zero_after_s,
        target=asked.target,
        loads=loads if seen.tells_load and role == "function" else None,
    )


def slo_of(router: FunctionRecord) -> Slo:
    """The objective in `KEYSTAGE_SLO` of a router function; none if it cannot be read: defaults hold."""
    text = router.deployment.envVars.get("KEYSTAGE_SLO", "")
    try:
        return msgspec.json.decode(text, type=Slo) if text else Slo()
    except UNREADABLE:  # the router itself refuses such a value by name
        return Slo()


def _start_s(seen: Seen, record: FunctionRecord) -> float | None:
    """Median seconds from start to ready of the function's ready replicas."""
    times_s = [
        r.ready_at_s - r.started_at_s
        for r in seen.replicas
        if r.function == record.deployment.service
        and r.state == "ready"
        and r.ready_at_s >= r.started_at_s > 0
    ]
    return statistics.median(times_s) if times_s else None


def _counters(stats: RouterStats, stage: int) -> Counters:
    found = next((c for c in stats.stages if c.stage == stage), None)
    if found is None:
        return Counters()
    return Counters(
        arrivals=found.arrivals,
        gap_sum_s=found.gap_sum_s,
        gap_sq_sum_s2=found.gap_sq_sum_s2,
        services=found.services,
        service_sum_s=found.service_sum_s,
        service_sq_sum_s2=found.service_sq_sum_s2,
        sojourn_sum_s=found.sojourn_sum_s,
        queue=found.queue,
        in_flight=found.in_flight,
        due=found.due,
        late=found.late,
        dropped=found.dropped,
    )


def _workers(stats: Sequence[RouterStats], stage: int) -> tuple[WorkerSample, ...]:
    """Ready workers of a stage. Each router knows a worker's whole busy time, so the first telling counts."""
    found: dict[str, WorkerSample] = {}
    for worker in (w for s in stats for w in s.replicas):
        if worker.state != "ready" or stage not in worker.stages:
            continue
        if worker.replica in found:
            found[worker.replica] = _idle_for_both(found[worker.replica], worker)
            continue
        place = worker.stages.index(stage)
        found[worker.replica] = WorkerSample(
            replica=worker.replica,
            slots=worker.slots,
            held_slots=worker.held_slots,
            busy_s=worker.busy_s[place] if place < len(worker.busy_s) else None,
            rows=worker.rows[place] if place < len(worker.rows) else None,
            served_s=worker.served_s,
            idle_s=worker.idle_s,
            is_slow=worker.resting,
        )
    return tuple(found.values())


def _idle_for_both(known: WorkerSample, worker: ReplicaStats) -> WorkerSample:
    """A router knows only of its own work: two tell at least when both gave a worker nothing."""
    assert known.idle_s is not None
    return msgspec.structs.replace(known, idle_s=known.idle_s - max(0.0, worker.served_s - worker.idle_s))


def _cpu_views(
    seen: Seen, pipelines: Mapping[str, Sequence[tuple[int, FunctionRecord]]]
) -> dict[str, CpuView]:
    """Cores of every CPU stage, by function; none where they cannot be set."""
    if seen.machine is None:
        return {}
    found: dict[str, Cores] = {}
    for index, record in (s for stages in pipelines.values() for s in stages if is_on_cpu(s[1])):
        name = record.deployment.service
        fits = seen.cpu_work.get(record.deployment.envVars.get("KEYSTAGE_BUNDLE", ""), ())
        counters = (c for s in seen.stats.get(pipeline_of(record), ()) for c in s.stages)
        found[name] = Cores(
            now=cores_of(record),
            base=float(threads_of(record)),
            running=sum(r.state in ("ready", "starting") for r in seen.replicas if r.function == name),
            queue=sum(c.queue for c in counters if c.stage == index),
            work=fits[index] if index < len(fits) else None,
        )
    return cpu_views(seen.machine.cores, found)

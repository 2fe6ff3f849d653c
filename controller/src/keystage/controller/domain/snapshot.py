"""What the controller sees at one moment: the input of `decide`.

Before it: a `Platform` observes the world and fills a `Snapshot`. After it: `policy.decide` reads
it. It must stay plain data: it is written to the decisions log and read back by the replay, so
every measured number may be missing (None) and NaN counts as missing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Measured = float | None
"""A measured number; None or NaN when it could not be had."""


class Override(msgspec.Struct, frozen=True, omit_defaults=True):
    """A person's scale request.

    Attributes:
        replicas: replicas asked for; 0 is allowed.
        expires_at_s: Unix seconds from which the policy rules again.
    """

    replicas: int
    expires_at_s: float


class Starting(msgspec.Struct, frozen=True, omit_defaults=True):
    """A replica that was asked for and does not serve yet.

    Attributes:
        replica: replica name.
        expected_ready_s: Unix seconds at which it should be ready; not known: a whole start time from now.
    """

    replica: str
    expected_ready_s: Measured


class Placed(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one replica runs, starting or ready.

    Attributes:
        replica: replica name.
        node: name of its node.
        gpus: indices of the node's GPUs it holds, empty when it holds none.
        is_ready: whether it serves.
    """

    replica: str
    node: str
    gpus: tuple[int, ...] = ()
    is_ready: bool = True


class GpuView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU of a node.

    Attributes:
        total_bytes: its memory.
        free_bytes: memory no replica has been given.
        replicas: replicas that hold it.
    """

    total_bytes: int
    free_bytes: int
    replicas: int = 0


class NodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of a cluster.

    Attributes:
        node: node name.
        gpus: its GPUs by index.
        cores_free: CPU cores no replica has been given.
        memory_free_bytes: host memory that may still hold parameters.
        in_memory: functions whose parameters lie in host memory (a holder of KeysManager).
        on_disk: functions whose parameters lie on the local disk.
    """

    node: str
    gpus: tuple[GpuView, ...] = ()
    cores_free: float = 0.0
    memory_free_bytes: int = 0
    in_memory: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one replica of a plain function is to be given.

    Attributes:
        kind: what load is: requests in flight, or requests a second.
        per_replica: load, > 0.
        step: replicas that load may ask for beyond those that are ready, None for no such bound.
    """

    kind: Literal["capacity", "rps"]
    per_replica: float
    step: int | None = None


class GatewayLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has in hand for a function.

    Attributes:
        gateway: its name, new with each of its starts.
        in_flight: requests it has now, waiting ones included.
        started: requests since it started.
    """

    gateway: str
    in_flight: Measured = None
    started: Measured = None


class FunctionView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replica numbers, bounds and intents of one function.

    Attributes:
        function: function name.
        desired: replicas wanted last, None before anybody decided.
        ready: replicas that serve.
        starting: replicas on their way.
        draining: names of those that finish what they have, for people: they count as gone.
        min_replicas: lower bound (`com.openfaas.scale.min`).
        max_replicas: upper bound (`com.openfaas.scale.max`).
        cap: bound given by the machine, None when there is none.
        cap_reason: why the machine bounds it, in words.
        override: a person's request, None when there is none.
        wake: a request waits for this function at zero.
        placed: where its replicas run, empty in a world without nodes.
        zero_after_s: seconds without work after which it may go to zero, whatever `min_replicas` says; None:
            only where that is 0, after the policy's own time.
        target: load that one replica is to be given, None: load does not change its number.
        loads: what each gateway has in hand for it, None where nobody tells.
    """

    function: str
    desired: int | None = None
    ready: int = 0
    starting: tuple[Starting, ...] = ()
    draining: tuple[str, ...] = ()
    min_replicas: int = 1
    max_replicas: int = 20
    cap: int | None = None
    cap_reason: str = ""
    override: Override | None = None
    wake: bool = False
    placed: tuple[Placed, ...] = ()
    zero_after_s: float | None = None
    target: Target | None = None
    loads: tuple[GatewayLoad, ...] | None = None

    @property
    def current(self) -> int:
        """Replicas wanted at present: the last decision, else what runs, at least the minimum."""
        if self.desired is not None:
            return max(0, self.desired)
        return max(0, self.min_replicas, self.ready + len(self.starting))


class Counters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cumulative counters of one stage at one router, as `router.api.StageCounters` has them.

    `queue` and `in_flight` are of now. `due`, `late` and `dropped` are of single-pass stages whose router
    tells them: items with an objective, and those of them that missed it.
    """

    arrivals: Measured = None
    gap_sum_s: Measured = None
    gap_sq_sum_s2: Measured = None
    services: Measured = None
    service_sum_s: Measured = None
    service_sq_sum_s2: Measured = None
    sojourn_sum_s: Measured = None
    queue: Measured = None
    in_flight: Measured = None
    due: Measured = None
    late: Measured = None
    dropped: Measured = None


class RouterSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One router's view of one stage.

    Attributes:
        incarnation: changes when the router restarts and its counters begin anew.
        at_s: the router's monotonic seconds; standing still means stale.
        counters: the stage's counters.
    """

    incarnation: str
    at_s: Measured
    counters: Counters


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ready worker of a stage.

    Attributes:
        replica: worker name.
        slots: sessions or items it takes at a time.
        held_slots: slots in use.
        busy_s: cumulative compute seconds for this stage.
        rows: cumulative rows computed for this stage.
        served_s: seconds since it became ready.
        idle_s: seconds of these in which it had nothing to do, at least.
        is_slow: whether its router gives it nothing for a while, because it is slow beside its like.
    """

    replica: str
    slots: Measured = None
    held_slots: Measured = None
    busy_s: Measured = None
    rows: Measured = None
    served_s: Measured = None
    idle_s: Measured = None
    is_slow: bool = False


class BatchProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Service time of a batch, l(b) = alpha_s b + beta_s seconds for 1 <= b <= most items."""

    alpha_s: float
    beta_s: float
    most: int = 1


class StartTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds from wanted to ready by where the parameters are; None where there is no such source.

    Attributes:
        gpu_s: on a GPU of the same node.
        memory_s: in the node's host memory.
        disk_s: on the node's disk.
        remote_s: on another node, or at the bundle's home.
    """

    gpu_s: Measured = None
    memory_s: Measured = None
    disk_s: Measured = None
    remote_s: Measured = None


class CpuView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cores of one replica of a stage, and what more of them would be worth.

    Attributes:
        cores: cores each replica has now.
        most: cores a replica may have (cpu_max).
        per_core_s: seconds x cores of an item's service that shrink as 1/cores (QUART section 5.3).
        low_s: lower end of its 95 % interval.
        high_s: upper end; where the interval holds 0 more cores are not known to help.
        base: cores each was deployed with: fewer are never asked for; None where nobody tells.
    """

    cores: float
    most: float
    per_core_s: Measured = None
    low_s: Measured = None
    high_s: Measured = None
    base: Measured = None


class StageView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage function: who it is, and what was measured.

    Attributes:
        stage: index of its (first) stage.
        scale: replica numbers and bounds.
        start_s: measured seconds from the start of a replica to ready, None when unknown.
        profile_s: service seconds of one item where a profile gives it, else None.
        routers: one sample per router, empty when none could be read.
        workers: one sample per ready worker.
        batch: l(b) where a profile gives it; then demand counts batches (mu = b*/l(b*)).
        starts: start times by source of the parameters, None where nobody tells them.
        cpu: cores of its replicas, None where they cannot be set.
        gpu_bytes: GPU memory a replica takes on each of its GPUs.
        gpus: GPUs a replica takes, 0 for none.
        parameter_bytes: size of its parameters.
        after: stages (by index) whose output it takes; None: the one before it in the pipeline.
    """

    stage: int
    scale: FunctionView
    start_s: Measured = None
    profile_s: Measured = None
    routers: tuple[RouterSample, ...] = ()
    workers: tuple[WorkerSample, ...] = ()
    batch: BatchProfile | None = None
    starts: StartTimes | None = None
    cpu: CpuView | None = None
    gpu_bytes: int = 0
    gpus: int = 0
    parameter_bytes: int = 0
    after: tuple[int, ...] | None = None


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Service-level objective of a pipeline in seconds; None where not stated."""

    ttft_s: Measured = None
    tpot_s: Measured = None
    deadline_s: Measured = None


class Answered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one router's requests got, counted since its start.

    Attributes:
        incarnation: changes when the router restarts and its counters begin anew.
        due: requests with an objective that ended.
        in_time: those of them that met it.
    """

    incarnation: str
    due: Measured = None
    in_time: Measured = None


class PipelineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline.

    Attributes:
        pipeline: pipeline name.
        execution: `looping`, `single-pass`, or `program` (stages are modules; requests may pass them often).
        slo: its objective.
        stages: stage functions in stage order.
        missing: why its statistics could not be read, empty when they were: the policy holds.
        batching: batch policy of a single-pass pipeline (`eager`, `deferred`, ...), empty where unknown.
        answered: what its requests got by router, for people; nothing is decided by it.
    """

    pipeline: str
    execution: Literal["looping", "single-pass", "program"]
    slo: Slo
    stages: tuple[StageView, ...]
    missing: str = ""
    batching: str = ""
    answered: tuple[Answered, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `decide` may know.

    Attributes:
        at_s: steady Unix seconds of the observation (never steps back within one controller).
        pipelines: pipelines with their stage functions.
        functions: every other function (routers, plain functions).
        budget_replicas: stage replicas there may be in all (R_total), None for no bound.
        nodes: nodes replicas can be placed on, empty in a world without a choice.
        shown: nodes as people are to see them where `nodes` does not tell it; nothing is decided by it.
    """

    at_s: float
    pipelines: tuple[PipelineView, ...] = ()
    functions: tuple[FunctionView, ...] = ()
    budget_replicas: int | None = None
    nodes: tuple[NodeView, ...] = ()
    shown: tuple[NodeView, ...] = ()

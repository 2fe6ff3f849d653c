"""The simulated world in data: cluster, pipelines, arrivals, and what comes out of a run.

Before it: a person or an experiment describes a `World`. After it: `simulator.run.simulate` runs it
under a `Steering` and answers an `Outcome`. Times are seconds from the start of the run, sizes bytes.
It holds no policy and no randomness. A world is plain data: JSON in, JSON out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from keystage.controller.domain.snapshot import Slo

Floats = npt.NDArray[np.float64]


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`count` nodes of one kind.

    Attributes:
        count: how many.
        gpus: GPUs of each; a replica of a stage with `gpus` = 0 needs none.
        gpu_bytes: memory of one GPU.
        cores: CPU cores of each.
        memory_bytes: host memory of each that may hold parameters.
        disk: whether all parameters lie on its disk from the start.
    """

    count: int = 1
    gpus: int = 0
    gpu_bytes: int = 0
    cores: float = 64.0
    memory_bytes: int = 1 << 40
    disk: bool = True


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How long a replica takes from wanted to ready: `fixed` + parameter bytes / rate, by source.

    A source is used in this order where it has the parameters: a GPU of the same node, host memory,
    disk, remote. A rate of 0 means there is no such source.

    Attributes:
        fixed_s: process, context, warm-up.
        gpu_bps: copied from another GPU of the node.
        memory_bps: from a holder in host memory.
        disk_bps: from the local disk.
        remote_bps: from another node or the bundle's home.
        holders: whether parameters stay in host memory: `none`, `key-stages` (a node keeps those of a key
            stage once a replica of it was ready there, until they are evicted), `ran` (those of every stage
            a replica of which was ready there), `all` (every parameter lies in every host memory from the
            start). What a start read from memory counts as used, so it is evicted later.
        key_stages: how many of a published ranking are key stages; so is, as in QUART section 6.1, every
            stage that was given more than its minimum of replicas. A key stage stays one.
        prewarm: every node fetches the parameters of a new key stage in the background, one after the
            other, at the disk's rate (without a disk: remotely). A fetch shares the disk with starts of its
            node and gives way to them: it begins when the starts under way have read the disk, stands still
            while later ones do, and is not made of a stage that a start there is loading. A node that
            failed loses what it was fetching, and fetches all key stages when it comes back. Only where
            holders are `key-stages` or `ran`.
        spread_s: standard deviation of the start time's log (0: every start takes the same time).
    """

    fixed_s: float = 0.0
    gpu_bps: float = 0.0
    memory_bps: float = 0.0
    disk_bps: float = 0.0
    remote_bps: float = 0.0
    holders: Literal["none", "key-stages", "ran", "all"] = "none"
    key_stages: int = 3
    prewarm: bool = False
    spread_s: float = 0.0


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: l(b) = (alpha_s + cpu_core_s / cores) b + beta_s for a batch of b items.

    Attributes:
        alpha_s: seconds per item.
        beta_s: seconds per batch.
        most: largest batch.
        scv: squared CV of a batch's service time around l(b): 0 constant, 1 exponential, else gamma.
        cpu_core_s: core-seconds per item (communication, serialisation), shared by the replica's cores.
        cores: cores of a replica at first.
        most_cores: cores a replica may be given (cpu_max).
        parameter_bytes: size of its parameters.
        gpus: GPUs a replica holds, all of one node; nobody else gets them unless `shared`.
        shared: whether replicas may share a GPU whose memory suffices; they then take turns on it.
        activation_bytes: bytes of an item's output.
        batching: when a replica begins a batch: `eager`, `timeout:MS`, `deferred`, `partial-slo`, as the
            router's `KEYSTAGE_BATCHING`. All but eager plan by the pipeline's `slo.deadline_s`, divided along
            its stages by their service times.
        late: what becomes of items that cannot meet it: `demote`: they wait behind the others; `refuse`:
            they leave the pipeline unserved.
        after: stages whose output it takes (all are waited for); None: the one before.
        min_replicas: lower bound.
        max_replicas: upper bound.
        replicas: replicas that are ready at the start.
    """

    alpha_s: float
    beta_s: float = 0.0
    most: int = 1
    scv: float = 0.0
    cpu_core_s: float = 0.0
    cores: float = 1.0
    most_cores: float = 8.0
    parameter_bytes: int = 0
    gpus: int = 0
    shared: bool = False
    activation_bytes: int = 0
    batching: str = "eager"
    late: Literal["demote", "refuse"] = "demote"
    after: tuple[int, ...] | None = None
    min_replicas: int = 1
    max_replicas: int = 1000
    replicas: int = 1


class ArrivalSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When requests arrive: a renewal process with gamma gaps, or given times.

    Attributes:
        rate_rps: mean rate.
        cv: coefficient of variation of the gaps (1: Poisson, 0: constant).
        count: requests; 0: as many as fit the world's duration.
        times_s: explicit times instead, sorted.
    """

    rate_rps: float = 0.0
    cv: float = 1.0
    count: int = 0
    times_s: tuple[float, ...] | None = None


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline and its traffic.

    Attributes:
        name: pipeline name; its stage functions are `<name>-stage-<k>`.
        stages: its stages.
        arrivals: its traffic.
        slo: its objective, as the policy sees it.
        execution: `single-pass`: items pass every stage once; `looping`: sessions hold a slot of every
            stage on their path and pass `steps` waves.
        slots: sessions one replica holds (looping).
        steps: mean waves of a session (looping), geometric.
        tokens: tokens of one response, for goodput.
        function: name of the router function shown beside the stages, empty for none.
    """

    name: str
    stages: tuple[StageSpec, ...]
    arrivals: ArrivalSpec
    slo: Slo = Slo()
    execution: Literal["single-pass", "looping"] = "single-pass"
    slots: int = 8
    steps: float = 64.0
    tokens: int = 1
    function: str = ""


class FailureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: at `at_s` one replica of a function (or all on a node) dies; its items are queued anew.

    Attributes:
        at_s: when.
        function: function whose oldest ready replica dies, or
        node: node whose replicas all die; it stays away for `for_s`.
        for_s: seconds the node stays away.
    """

    at_s: float
    function: str = ""
    node: str = ""
    for_s: float = 0.0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs but the seed and the steering.

    Attributes:
        pipelines: pipelines with their traffic.
        nodes: the cluster; empty: replicas need no place.
        load: start times.
        hop_s: seconds from a stage to the next on the same node (or without nodes).
        network_s: the same between nodes, plus activation bytes / network_bps.
        network_bps: bytes per second between nodes, 0 for unlimited.
        duration_s: arrivals end here where no count says so; the run ends when all is served.
        limit_s: the run ends here at the latest, served or not.
        tick_s: seconds between observations.
        failures: what breaks.
        budget_replicas: R_total shown to the policy.
        warm_s: requests that arrive before this do not count in the measures (they do in the totals).
    """

    pipelines: tuple[PipelineSpec, ...]
    nodes: tuple[NodeSpec, ...] = ()
    load: LoadSpec = LoadSpec()
    hop_s: float = 0.0
    network_s: float = 0.0
    network_bps: float = 0.0
    duration_s: float = 60.0
    limit_s: float = 1e9
    tick_s: float = 0.25
    failures: tuple[FailureSpec, ...] = ()
    budget_replicas: int | None = None
    warm_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StageOutcome:
    """What happened at one stage.

    Attributes:
        function: stage function.
        arrivals: items that came.
        queue_mean: time average of waiting items (Little: rate times mean wait).
        wait_mean_s: mean wait.
        busy_ratio: busy seconds over seconds of ready replicas.
        replica_s: replica-seconds, from wanted (GPU taken) to gone.
        starts: replicas started.
        starts_by_source: the same by source of parameters (`gpu`, `memory`, `disk`, `remote`).
        gap_cv: CV of the gaps between arrivals at this stage.
        series: (time, desired, ready) at each change, float array [n, 3].
    """

    function: str
    arrivals: int
    queue_mean: float
    wait_mean_s: float
    busy_ratio: float
    replica_s: float
    starts: int
    starts_by_source: dict[str, int]
    gap_cv: float
    series: Floats


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """What happened to the requests of one pipeline.

    Attributes:
        pipeline: its name.
        arrived_s: arrival times [n], in order.
        finished_s: finish times [n]; NaN where the run ended first, or the request was refused.
        stages: per stage.
        tokens: tokens of a response.
    """

    pipeline: str
    arrived_s: Floats
    finished_s: Floats
    stages: tuple[StageOutcome, ...]
    tokens: int = 1

    @property
    def latency_s(self) -> Floats:
        """Latencies [n]; infinite where the run ended first."""
        return np.where(np.isnan(self.finished_s), np.inf, self.finished_s - self.arrived_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        pipelines: per pipeline, in the world's order.
        ended_s: when the run ended.
        gpu_s: GPU-seconds taken by replicas, from wanted to gone (replica-seconds where stages hold no GPU).
        cpu_core_s: core-seconds of the replicas likewise.
        events: events handled.
        wall_s: seconds the run took on this machine.
        log_sha256: digest of the event log, empty when none was asked for.
    """

    pipelines: tuple[PipelineOutcome, ...]
    ended_s: float
    gpu_s: float
    cpu_core_s: float
    events: int
    wall_s: float
    log_sha256: str = ""

"""The report: one document that says what every pipeline, stage, replica and node is doing, and why.

Before it: the controller makes one from every tick (`observability.reporting`, pure) and hands it to an
`Audience`: the supervisor's control socket in the local world, every gateway on Kubernetes. After it: the
gateway serves it (`/system/keystage/report`, and as server-sent events), and the live page, `keystage top`,
`keystage status` and `keystage explain` read it. It carries no environment, no secret, no prompt. Field names
are part of the HTTP API: times are Unix seconds, `_s` seconds, `_rps` a second, `_ratio` 0 to 1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

REPORT_PATH = "/system/keystage/report"
EVENTS_PATH = "/system/keystage/events"
STALE_S = 5.0
"""A report older than this is shown as old: the controller may be gone."""
MOST_DECISIONS = 500
"""Entries of the decision log a report carries."""
TIMELINE_POINTS = 300
"""One a second: five minutes."""

ReplicaState = Literal["starting", "ready", "draining"]


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica of a function.

    Attributes:
        replica: its name.
        state: `starting`, `ready` or `draining`.
        node: where, empty where there is one node only.
        gpus: indices of the GPUs it holds there.
        since_s: seconds in this state, None where unknown.
        is_slow: whether its router gives it nothing for a while, because it is slow beside its like.
    """

    replica: str
    state: ReplicaState
    node: str = ""
    gpus: tuple[int, ...] = ()
    since_s: float | None = None
    is_slow: bool = False


class StageReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage of a pipeline; numbers are None where nothing was measured.

    Attributes:
        stage: index in the pipeline.
        function: its function's name.
        desired: replicas decided.
        ready: replicas that serve.
        starting: replicas on their way.
        draining: replicas that finish what they have.
        is_key: whether it is among the key stages now (the first of the ranking whose score counts).
        rank: place in the ranking of key stages, 0 the most critical, None without a ranking.
        queue: items that wait.
        in_flight: items in service.
        arrival_rps: arrivals a second.
        arrival_cv: coefficient of variation of the gaps between them.
        service_s: mean service time.
        wait_s: mean wait.
        utilisation_ratio: arrival rate over capacity of the ready replicas; looping: the busy part of their
            time, at most 1.
        share_s: the part of the objective this stage may use.
        reason: why it has this number, in the policy's words; until when, where a person asked for it.
        override_until_s: Unix seconds until which a person's number holds, None where nobody asked for one.
        replicas: each of them, at most 64; the counts above are of all.
    """

    stage: int
    function: str
    desired: int = 0
    ready: int = 0
    starting: int = 0
    draining: int = 0
    is_key: bool = False
    rank: int | None = None
    queue: float | None = None
    in_flight: float | None = None
    arrival_rps: float | None = None
    arrival_cv: float | None = None
    service_s: float | None = None
    wait_s: float | None = None
    utilisation_ratio: float | None = None
    share_s: float | None = None
    reason: str = ""
    override_until_s: float | None = None
    replicas: tuple[ReplicaReport, ...] = ()


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline.

    Attributes:
        pipeline: its name: also the name of its router's function.
        execution: `looping`, `single-pass` or `program`.
        stages: in order.
        arrival_rps: requests a second at its entry.
        latency_s: mean sojourn over all stages, None where unknown.
        deadline_s: objective for the whole answer, None where not stated.
        ttft_s: objective for the first token of a looping pipeline, the default where none is stated at all.
        tpot_s: objective for the time per token after it, None where not stated.
        entry_wait_s: looping: how long a session that comes now waits for a slot, by the sessions that wait,
            how long one holds its slot, and the slots there are; None where one of them is not known.
        attainment_ratio: part of the last minute's requests that met it, None where nobody counts.
        missing: why its statistics could not be read, empty when they were: the policy holds.
    """

    pipeline: str
    execution: str
    stages: tuple[StageReport, ...] = ()
    arrival_rps: float | None = None
    latency_s: float | None = None
    deadline_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    entry_wait_s: float | None = None
    attainment_ratio: float | None = None
    missing: str = ""


class FunctionReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that is no stage; fields are those of a stage."""

    function: str
    desired: int = 0
    ready: int = 0
    starting: int = 0
    reason: str = ""
    override_until_s: float | None = None


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: its memory in bytes, what of it no replica was given, and how many replicas hold it."""

    total_bytes: int
    free_bytes: int
    replicas: int = 0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node.

    Attributes:
        node: its name.
        gpus: its GPUs by index.
        cores_free: CPU cores no replica was given.
        memory_free_bytes: host memory that may still hold parameters.
        in_memory: functions whose parameters lie in its memory, sorted.
        on_disk: functions whose parameters lie on its disk, sorted.
    """

    node: str
    gpus: tuple[GpuReport, ...] = ()
    cores_free: float = 0.0
    memory_free_bytes: int = 0
    in_memory: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()


class DecisionReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the decision log: a change, not a tick.

    Attributes:
        number: grows by one with each, over the life of a controller.
        at_s: when.
        function: whose replicas or cores changed; the pipeline's name for a new order of key stages and for
            a hold.
        kind: `replicas`, `cores`, `key-stages`, `override`, `hold`.
        before: the number before, None where there was none.
        after: the number after, None where it is no number.
        text: in words: "stage 3: 2 -> 4, predicted wait 310 ms > 80 ms".
        inputs: the numbers behind it, by name with unit.
    """

    number: int
    at_s: float
    function: str
    kind: Literal["replicas", "cores", "key-stages", "override", "hold"]
    text: str
    before: float | None = None
    after: float | None = None
    inputs: dict[str, float] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything at one moment.

    Attributes:
        controller: name of the controller that made it, new with each of its starts.
        number: grows with every report of a controller.
        at_s: when it looked.
        version: of Keystage.
        pipelines: sorted by name.
        functions: every other one, sorted by name.
        nodes: sorted by name.
        decisions: the newest last, at most `MOST_DECISIONS`.
        trouble: what keeps the controller from acting, in words, empty while it acts.
    """

    controller: str
    number: int
    at_s: float
    version: str = ""
    pipelines: tuple[PipelineReport, ...] = ()
    functions: tuple[FunctionReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    decisions: tuple[DecisionReport, ...] = ()
    trouble: str = ""

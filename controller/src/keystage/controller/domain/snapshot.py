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
        expected_ready_s: Unix seconds at which it should be ready.
    """

    replica: str
    expected_ready_s: float


class FunctionView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replica numbers, bounds and intents of one function.

    Attributes:
        function: function name.
        desired: replicas wanted last, None before anybody decided.
        ready: replicas that serve.
        starting: replicas on their way.
        min_replicas: lower bound (`com.openfaas.scale.min`).
        max_replicas: upper bound (`com.openfaas.scale.max`).
        cap: bound given by the machine, None when there is none.
        cap_reason: why the machine bounds it, in words.
        override: a person's request, None when there is none.
        wake: a request waits for this function at zero.
    """

    function: str
    desired: int | None = None
    ready: int = 0
    starting: tuple[Starting, ...] = ()
    min_replicas: int = 1
    max_replicas: int = 20
    cap: int | None = None
    cap_reason: str = ""
    override: Override | None = None
    wake: bool = False

    @property
    def current(self) -> int:
        """Replicas wanted at present: the last decision, else what runs, at least the minimum."""
        if self.desired is not None:
            return max(0, self.desired)
        return max(0, self.min_replicas, self.ready + len(self.starting))


class Counters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cumulative counters of one stage at one router, as `router.api.StageCounters` has them.

    `queue` and `in_flight` are of now.
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
    """

    replica: str
    slots: Measured = None
    held_slots: Measured = None
    busy_s: Measured = None
    rows: Measured = None


class StageView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage function: who it is, and what was measured.

    Attributes:
        stage: index of its (first) stage.
        scale: replica numbers and bounds.
        start_s: measured seconds from the start of a replica to ready, None when unknown.
        profile_s: service seconds of one item where a profile gives it, else None.
        routers: one sample per router, empty when none could be read.
        workers: one sample per ready worker.
    """

    stage: int
    scale: FunctionView
    start_s: Measured = None
    profile_s: Measured = None
    routers: tuple[RouterSample, ...] = ()
    workers: tuple[WorkerSample, ...] = ()


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Service-level objective of a pipeline in seconds; None where not stated."""

    ttft_s: Measured = None
    tpot_s: Measured = None
    deadline_s: Measured = None


class PipelineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline.

    Attributes:
        pipeline: pipeline name.
        execution: `looping` or `single-pass`.
        slo: its objective.
        stages: stage functions in stage order.
        missing: why its statistics could not be read, empty when they were: the policy holds.
    """

    pipeline: str
    execution: Literal["looping", "single-pass"]
    slo: Slo
    stages: tuple[StageView, ...]
    missing: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `decide` may know.

    Attributes:
        at_s: steady Unix seconds of the observation (never steps back within one controller).
        pipelines: pipelines with their stage functions.
        functions: every other function (routers, plain functions).
        budget_replicas: stage replicas there may be in all (R_total), None for no bound.
    """

    at_s: float
    pipelines: tuple[PipelineView, ...] = ()
    functions: tuple[FunctionView, ...] = ()
    budget_replicas: int | None = None

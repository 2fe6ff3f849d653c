"""From what the controller saw and decided to the report that an operator reads. Pure but for its memory.

Before it: `controller.telling` hands every record of the loop on, and asks for a report once a second
at most. After it: an `Audience` delivers it. Time comes with the records; it does no IO, costs time
in proportion to the stages, and whatever a record holds (nothing measured, no numbers), a report comes
out. Between two looks at a quiet pipeline, which the policy passes over, its numbers are those of the
last look; queues are always of now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import StageReport as Told
from keystage.controller.domain.snapshot import (
    FunctionView,
    NodeView,
    PipelineView,
    StageView,
)
from keystage.controller.policy.outcome import RESTING
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.shares import longest_s, predecessors, visits
from keystage.observability import words
from keystage.observability.api import (
    FunctionReport,
    GpuReport,
    NodeReport,
    PipelineReport,
    ReplicaReport,
    ReplicaState,
    Report,
    StageReport,
)
from keystage.observability.attainment import Attainment, token_objective_s
from keystage.observability.busy import Busy
from keystage.observability.changes import Changes, key_count
from keystage.observability.words import known, short

MOST_NAMED = 64
"""Replicas of a stage that are named."""
_States = dict[str, tuple[ReplicaState, float | None]]
"""By replica: its state, and since when (Unix seconds), None: since before anybody looked."""


class Reporter:
    """Makes reports.

    Args:
        controller: name of the controller, new with each of its starts.
        version: of Keystage.
    """

    def __init__(self, controller: str, version: str = "") -> None:
        self._controller = controller
        self._version = version
        self._number = 0
        self._changes = Changes()
        self._told: dict[str, Told] = {}
        """By function: the newest that was decided by looking at it."""
        self._attained: dict[str, Attainment] = {}
        self._busy: dict[str, Busy] = {}
        """By function of a looping pipeline."""
        self._states: _States | None = None

    def note(self, record: Record) -> None:
        """Takes in one tick: what it changed goes into the decision log."""
        self._changes.note(record)
        told = self._told
        for report in record.decision.reports:
            if not is_resting(report) or report.function not in told:
                told[report.function] = report

    def report(self, record: Record | None, trouble: str, at_s: float) -> Report:
        """The report of a moment.

        Args:
            record: the newest tick, None: there was none yet.
            trouble: what keeps the controller from acting, empty while it acts.
            at_s: Unix seconds of the newest look, one that failed included.
        """
        self._number += 1
        head = Report(
            controller=self._controller,
            number=self._number,
            at_s=round(at_s, 3),
            version=self._version,
            decisions=self._changes.newest(),
            trouble=trouble,
        )
        if record is None:
            return head
        snapshot, published = record.snapshot, record.decision.state.published
        self._forget(record)
        states: _States = {}
        pipelines = [
            self._pipeline(record.settings, view, published.get(view.pipeline, ()), snapshot.at_s, states)
            for view in snapshot.pipelines
        ]
        self._states = states
        return msgspec.structs.replace(
            head,
            pipelines=tuple(sorted(pipelines, key=lambda pipeline: pipeline.pipeline)),
            functions=tuple(sorted(map(self._function, snapshot.functions), key=lambda f: f.function)),
            nodes=tuple(
                sorted(map(node_report, snapshot.shown or snapshot.nodes), key=lambda node: node.node)
            ),
        )

    # ------------------------------------------------------------ parts

    def _pipeline(
        self,
        settings: PolicySettings,
        view: PipelineView,
        order: tuple[int, ...],
        at_s: float,
        states: _States,
    ) -> PipelineReport:
        told = [self._told.get(stage.scale.function) for stage in view.stages]
        entry_rps = known(told[0].arrival_rps) if told and told[0] is not None else None
        ranks = {stage: rank for rank, stage in enumerate(order)}
        keys = key_count(len(view.stages)) if entry_rps else 0
        ttft_s, tpot_s = token_objective_s(settings, view)
        stages = [
            self._stage(stage, one, ranks.get(stage.stage), keys, at_s, states)
            for stage, one in zip(view.stages, told, strict=True)
        ]
        if view.execution == "looping":
            stages = [
                self._computing(stage, made, at_s) for stage, made in zip(view.stages, stages, strict=True)
            ]
        return PipelineReport(
            pipeline=view.pipeline,
            execution=view.execution,
            stages=tuple(stages),
            arrival_rps=short(entry_rps),
            latency_s=short(latency_s(view, told)),
            deadline_s=known(view.slo.deadline_s),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            entry_wait_s=short(entry_wait_s(view, stages)),
            attainment_ratio=short(self._attained.setdefault(view.pipeline, Attainment()).note(view, at_s)),
            missing=view.missing,
        )

    def _stage(
        self, stage: StageView, told: Told | None, rank: int | None, keys: int, at_s: float, states: _States
    ) -> StageReport:
        scale = stage.scale
        report = StageReport(
            stage=stage.stage,
            function=scale.function,
            desired=told.replicas if told is not None else scale.current,
            ready=scale.ready,
            starting=len(scale.starting),
            draining=len(scale.draining),
            is_key=rank is not None and rank < keys,
            rank=rank,
            queue=_sum([router.counters.queue for router in stage.routers]),
            in_flight=_sum([router.counters.in_flight for router in stage.routers]),
            replicas=tuple(self._replicas(stage, at_s, states)),
        )
        if told is None:
            return report
        service_s, sojourn_s, scv = known(told.service_s), known(told.sojourn_s), known(told.arrival_scv)
        return msgspec.structs.replace(
            report,
            arrival_rps=short(told.arrival_rps),
            arrival_cv=short(math.sqrt(scv)) if scv is not None and scv >= 0 else None,
            service_s=short(service_s),
            wait_s=(
                short(max(0.0, sojourn_s - service_s))
                if sojourn_s is not None and service_s is not None
                else None
            ),
            utilisation_ratio=short(told.utilisation_ratio),
            share_s=short(told.share_s),
            reason=words.until(told.reason, _until_s(scale)),
            override_until_s=_until_s(scale),
        )

    def _computing(self, stage: StageView, made: StageReport, at_s: float) -> StageReport:
        """With the busy part of its workers' time of now, where that is known."""
        busy = self._busy.setdefault(made.function, Busy()).note(stage, at_s)
        return made if busy is None else msgspec.structs.replace(made, utilisation_ratio=short(busy))

    def _replicas(self, stage: StageView, at_s: float, states: _States) -> Iterator[ReplicaReport]:
        """Those that are known by name, ready ones first, then starting, then draining ones."""
        places = {place.replica: place for place in stage.scale.placed}
        slow = {worker.replica for worker in stage.workers if worker.is_slow}
        known_before = self._states
        for replica, state in named_replicas(stage):
            before = known_before.get(replica) if known_before is not None else None
            if before is not None and before[0] == state:
                since_s = before[1]
            else:
                since_s = at_s if known_before is not None else None
            states[replica] = (state, since_s)
            place = places.get(replica)
            yield ReplicaReport(
                replica=replica,
                state=state,
                node=place.node if place is not None else "",
                gpus=place.gpus if place is not None else (),
                since_s=None if since_s is None else round(max(0.0, at_s - since_s), 1),
                is_slow=replica in slow,
            )

    def _function(self, scale: FunctionView) -> FunctionReport:
        told = self._told.get(scale.function)
        return FunctionReport(
            function=scale.function,
            desired=told.replicas if told is not None else scale.current,
            ready=scale.ready,
            starting=len(scale.starting),
            reason=words.until(told.reason, _until_s(scale)) if told is not None else "",
            override_until_s=_until_s(scale),
        )

    def _forget(self, record: Record) -> None:
        """Drops what is gone."""
        if len(self._told) > len(record.decision.reports):
            there = {report.function for report in record.decision.reports}
            self._told = {name: told for name, told in self._told.items() if name in there}
        if len(self._attained) > len(record.snapshot.pipelines):
            views = {view.pipeline for view in record.snapshot.pipelines}
            self._attained = {name: held for name, held in self._attained.items() if name in views}
        if self._busy.keys() - self._told.keys():
            self._busy = {name: busy for name, busy in self._busy.items() if name in self._told}


def is_resting(told: Told) -> bool:
    """Whether the policy passed over a function: nothing changed since it looked last."""
    return told.reason == RESTING and told.arrival_rps is None


def named_replicas(stage: StageView) -> list[tuple[str, ReplicaState]]:
    """A stage's replicas that are known by name, each once, with their states; `MOST_NAMED` at most."""
    scale = stage.scale
    found: dict[str, ReplicaState] = {}
    for name in scale.draining:
        found[name] = "draining"
    for one in scale.starting:
        found.setdefault(one.replica, "starting")
    for place in scale.placed:
        found.setdefault(place.replica, "ready" if place.is_ready else "starting")
    for worker in stage.workers:
        found.setdefault(worker.replica, "ready")
    order: Mapping[ReplicaState, int] = {"ready": 0, "starting": 1, "draining": 2}
    return sorted(found.items(), key=lambda item: order[item[1]])[:MOST_NAMED]


def latency_s(view: PipelineView, told: Sequence[Told | None]) -> float | None:
    """Mean time of a request in the pipeline, None where a stage's is not known.

    Single-pass: the sum over the stages. Programs: the longest way through the graph, a stage that is passed
    often counted as often. Looping: sessions are measured at their entry, as a whole.
    """
    sojourns_s: list[float] = []
    rates_rps: list[float | None] = []
    for one in told:
        sojourn_s = known(one.sojourn_s) if one is not None else None
        if one is None or sojourn_s is None:
            return None
        if view.execution == "looping":
            return sojourn_s
        sojourns_s.append(sojourn_s)
        rates_rps.append(known(one.arrival_rps))
    if not sojourns_s:
        return None
    graph = predecessors(view.stages)
    if view.execution == "program":
        entries = [rate for rate, before in zip(rates_rps, graph, strict=True) if not before]
        passes = visits(entries, rates_rps)
        sojourns_s = [s * times for s, times in zip(sojourns_s, passes, strict=True)]
    return max(longest_s(graph, sojourns_s))


def entry_wait_s(view: PipelineView, stages: Sequence[StageReport]) -> float | None:
    """How long a session that comes now waits for a slot of a looping pipeline, None where unknown.

    A session holds a slot of every stage, so of n slots at the stage that has fewest one comes free every
    service_s / n seconds.
    """
    if view.execution != "looping" or not stages:
        return None
    queue, service_s = stages[0].queue, stages[0].service_s
    slots = min(sum(known(worker.slots) or 0.0 for worker in stage.workers) for stage in view.stages)
    if queue is None or service_s is None or slots <= 0:
        return None
    return queue * service_s / slots


def node_report(node: NodeView) -> NodeReport:
    """One node."""
    return NodeReport(
        node=node.node,
        gpus=tuple(
            GpuReport(total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, replicas=gpu.replicas)
            for gpu in node.gpus
        ),
        cores_free=short(node.cores_free) or 0.0,
        memory_free_bytes=node.memory_free_bytes,
        in_memory=tuple(sorted(node.in_memory)),
        on_disk=tuple(sorted(node.on_disk)),
    )


def _until_s(scale: FunctionView) -> float | None:
    """When a person's number ends, Unix seconds."""
    end_s = known(scale.override.expires_at_s) if scale.override is not None else None
    return round(end_s, 1) if end_s is not None else None


def _sum(values: Sequence[float | None]) -> float | None:
    """Over those that are numbers; None where none is."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return sum(numbers) if numbers else None

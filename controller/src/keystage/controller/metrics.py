"""What the controller shows of itself and of its decisions, as Prometheus samples.

Before it: `loop` hands over every tick. After it: `health` shows it at `/metrics`. Gauges are of the newest
tick alone, so what is removed is gone from them; counters have no label but the kind of change, of which
there are a fixed few. Names and meanings are in `wire.metrics`.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator

import msgspec

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
    StageReport,
)
from keystage.controller.domain.snapshot import FunctionView, PipelineView, Snapshot, StageView
from keystage.controller.policy.outcome import RESTING
from keystage.wire.metrics import Sample

REASONS = ("scale-up", "scale-down", "to-zero", "from-zero", "override", "cores", "key-stages")
"""Kinds of changes: all values of the label."""


class Counts:
    """Ticks so far, and the newest of them. Heard by the loop's thread, read by those that serve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks = self._failures = 0
        self._decisions: Counter[str] = Counter()
        self._newest: Record | None = None
        self._reports: dict[str, StageReport] = {}

    def hear(self, record: Record | None, trouble: str) -> None:
        """One tick.

        Args:
            record: what was seen and decided, None where nothing could be seen.
            trouble: what failed, empty: nothing did.
        """
        with self._lock:
            self._failures += bool(trouble)
            if record is None:
                return
            self._ticks += 1
            self._newest = record
            self._reports = {report.function: self._known(report) for report in record.decision.reports}
            before = _scales(record.snapshot)
            self._decisions.update(kind for a in record.decision.actions if (kind := _kind(a, before)))

    def samples(self) -> Iterator[Sample]:
        """Everything that is known now."""
        with self._lock:
            ticks, failures, decisions = self._ticks, self._failures, self._decisions.copy()
            record, reports = self._newest, self._reports
        yield Sample("keystage_ticks", {}, ticks)
        yield Sample("keystage_platform_failures", {}, failures)
        for reason in REASONS:
            yield Sample("keystage_decisions", {"reason": reason}, decisions[reason])
        if record is None:
            return
        for view in record.snapshot.pipelines:
            yield from _of_pipeline(record, view, reports)

    def _known(self, report: StageReport) -> StageReport:
        """A pipeline that is passed over is not looked at: what was known of it still is."""
        before = self._reports.get(report.function)
        if before is None or report.reason != RESTING:
            return report
        return msgspec.structs.replace(before, replicas=report.replicas)


def _of_pipeline(record: Record, view: PipelineView, reports: dict[str, StageReport]) -> Iterator[Sample]:
    order = record.decision.state.published.get(view.pipeline, ())
    is_held = any(_is_held(reports.get(stage.scale.function)) for stage in view.stages)
    yield Sample("keystage_pipeline_held", {"pipeline": view.pipeline}, float(is_held))
    for stage in view.stages:
        labels = {"pipeline": view.pipeline, "stage": str(stage.stage)}
        report = reports.get(stage.scale.function)
        yield Sample("keystage_stage_starting_replicas", labels, len(stage.scale.starting))
        yield Sample("keystage_stage_is_key", labels, float(order[:1] == (stage.stage,)))
        if report is not None:
            yield from _of_stage(labels, stage, report)


def _of_stage(labels: dict[str, str], stage: StageView, report: StageReport) -> Iterator[Sample]:
    yield Sample("keystage_stage_desired_replicas", labels, report.replicas)
    cv = math.sqrt(max(0.0, report.arrival_scv)) if report.arrival_scv is not None else None
    for name, value in (
        ("keystage_stage_arrival_rps", report.arrival_rps),
        ("keystage_stage_arrival_cv", cv),
        ("keystage_stage_utilisation_ratio", report.utilisation_ratio),
    ):
        if value is not None:
            yield Sample(name, labels, value)


def _is_held(report: StageReport | None) -> bool:
    return report is not None and report.reason.startswith("hold:")


def _scales(snapshot: Snapshot) -> dict[str, FunctionView]:
    scales = [stage.scale for view in snapshot.pipelines for stage in view.stages]
    return {scale.function: scale for scale in (*scales, *snapshot.functions)}


def _kind(action: Action, before: dict[str, FunctionView]) -> str:
    """Which of `REASONS` a change is, empty for what follows from another."""
    match action:
        case SetReplicas():
            scale = before.get(action.function)
            current = scale.current if scale is not None else 0
            if action.replicas == current:
                return ""  # what is so is stated, after a start
            if scale is not None and scale.override is not None:
                return "override"
            if action.replicas == 0:
                return "to-zero"
            if action.replicas > current:
                return "scale-up" if current else "from-zero"
            return "scale-down"
        case SetCpu():
            return "cores"
        case PublishKeyStages():
            return "key-stages"
        case LiftOverride() | ClearWake():
            return ""

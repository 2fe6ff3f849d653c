"""The decision log: what changed, when, and why in words with the numbers. Pure, time comes with the records.

Before it: `reporting`, which hands every record of the controller on. After it: a report carries the newest
entries. A tick that changes nothing leaves none. A pipeline that is held leaves one when holding begins, or
when its reason becomes another one, not each tick; one that is held again within `AGAIN_S` is held still.
What is stated again, since it did not arrive, is one change. It must not decide.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import (
    Action,
    ClearWake,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.decision import StageReport as Told
from keystage.controller.domain.snapshot import FunctionView, PipelineView, StageView
from keystage.controller.policy.smoother import KEY_RATIO
from keystage.observability import words
from keystage.observability.api import MOST_DECISIONS, DecisionReport

AGAIN_S = 10.0
"""A router that misses every other look holds its pipeline for one reason, not for many."""
MOST_KEYS = 8
"""Key stages that an entry names, with their scores."""
_NUMBERS = re.compile(r"\d[\d.]*(?:e[-+]?\d+)?")
Kind = Literal["replicas", "cores", "key-stages", "override", "hold"]


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A function of a snapshot: how it is called in words, and what there is to say of it."""

    name: str
    scale: FunctionView
    stage: StageView | None = None
    pipeline: PipelineView | None = None


@dataclasses.dataclass(slots=True)
class _Hold:
    """A pipeline that is, or was, held: for which reason (without its numbers), and when last."""

    key: str
    at_s: float
    is_on: bool

    def lasts(self, at_s: float) -> bool:
        """Whether holding again now goes on with it."""
        return self.is_on or at_s - self.at_s <= AGAIN_S


class Changes:
    """Keeps the newest entries.

    Args:
        most: entries kept.
    """

    def __init__(self, most: int = MOST_DECISIONS) -> None:
        self._entries: deque[DecisionReport] = deque(maxlen=most)
        self._number = 0
        self._holds: dict[str, _Hold] = {}
        self._stated: dict[tuple[str, str], tuple[object, float]] = {}
        """By name and kind: what was stated last, and when."""

    def note(self, record: Record) -> None:
        """Takes in one tick."""
        if not math.isfinite(record.snapshot.at_s):
            return
        self._hold(record)
        if record.decision.actions:
            subjects = subjects_of(record)
            told = {report.function: report for report in record.decision.reports}
            for action in record.decision.actions:
                self._act(action, record, subjects, told)
            there = subjects.keys() | {view.pipeline for view in record.snapshot.pipelines}
            self._stated = {key: last for key, last in self._stated.items() if key[0] in there}

    def newest(self) -> tuple[DecisionReport, ...]:
        """The entries, the newest last."""
        return tuple(self._entries)

    # ------------------------------------------------------------ one kind each

    def _act(
        self, action: Action, record: Record, subjects: dict[str, Subject], told: dict[str, Told]
    ) -> None:
        at_s = record.snapshot.at_s
        match action:
            case SetReplicas(function):
                subject = subjects.get(function)
                if subject is not None:
                    self._replicas(action, subject, told.get(function), record)
            case SetCpu(function, cores):
                subject = subjects.get(function)
                if subject is not None:
                    self._cores(cores, subject, told.get(function), at_s)
            case PublishKeyStages():
                self._key_stages(action, record)
            case LiftOverride(function):
                subject = subjects.get(function)
                if subject is not None:
                    self._lifted(subject, at_s)
            case ClearWake():
                pass  # the number it led to was told

    def _replicas(self, action: SetReplicas, subject: Subject, told: Told | None, record: Record) -> None:
        scale, at_s = subject.scale, record.snapshot.at_s
        before, after = scale.desired, action.replicas
        reason = told.reason if told is not None else ""
        is_override = reason.startswith(words.OVERRIDE)
        numbers = numbers_of(subject, told)
        why = words.because(reason, numbers, is_more=after >= scale.current)
        where = words.places([site.node for site in action.sites])
        lack = _lack(record, action.function)
        text = words.change(
            subject.name, before, after, "replica", ", ".join(part for part in (why, where, lack) if part)
        )
        kind: Kind = "override" if is_override else "replicas"
        inputs = inputs_of(subject, told, numbers)
        self._changed(kind, action.function, (before, after), text, at_s, inputs)

    def _cores(self, cores: float, subject: Subject, told: Told | None, at_s: float) -> None:
        cpu = subject.stage.cpu if subject.stage is not None else None
        before = cpu.cores if cpu is not None else None
        numbers = numbers_of(subject, told)
        is_more = before is not None and cores > before
        why = words.because(told.reason, numbers, is_more=is_more) if told is not None else ""
        text = words.change(subject.name, before, cores, "core", why)
        inputs = inputs_of(subject, told, numbers)
        self._changed("cores", subject.scale.function, (before, cores), text, at_s, inputs)

    def _key_stages(self, action: PublishKeyStages, record: Record) -> None:
        order = [entry.stage for entry in action.ranking]
        before = record.before.published.get(action.pipeline, ())
        keys = min(MOST_KEYS, key_count(len(order)))
        text = words.order(order, before, keys)
        scores = {
            f"stage_{entry.stage}_score_ratio": entry.score
            for entry in action.ranking[:MOST_KEYS]
            if math.isfinite(entry.score)
        }
        if self._is_news(action.pipeline, "key-stages", tuple(order), record.snapshot.at_s):
            self._add("key-stages", action.pipeline, text, record.snapshot.at_s, scores)

    def _lifted(self, subject: Subject, at_s: float) -> None:
        override = subject.scale.override
        asked = f" for {words.counted(override.replicas, 'replica')}" if override is not None else ""
        text = f"{subject.name}: a person's request{asked} has ended, the policy decides again"
        if self._is_news(subject.scale.function, "override", text, at_s):
            self._add("override", subject.scale.function, text, at_s, {})

    def _hold(self, record: Record) -> None:
        """Holds of whole pipelines: their stages come first among the reports, in the snapshot's order."""
        snapshot, reports = record.snapshot, record.decision.reports
        at = 0
        for view in snapshot.pipelines:
            mine = reports[at : at + len(view.stages)]
            at += len(view.stages)
            reason = next((r.reason for r in mine if r.reason.startswith(words.HOLD)), "")
            self._held(view.pipeline, reason, snapshot.at_s)
        if len(self._holds) > len(snapshot.pipelines):
            there = {view.pipeline for view in snapshot.pipelines}
            self._holds = {name: hold for name, hold in self._holds.items() if name in there}

    def _held(self, pipeline: str, reason: str, at_s: float) -> None:
        before = self._holds.get(pipeline)
        if not reason:
            if before is not None:
                before.is_on = False
            return
        why = reason[len(words.HOLD) :].split("; ")[0]
        key = _NUMBERS.sub("#", why)
        goes_on = before is not None and before.key == key and before.lasts(at_s)
        if not goes_on:
            self._add("hold", pipeline, f"holds all replica numbers: {why}", at_s, {})
        self._holds[pipeline] = _Hold(key, at_s, is_on=True)

    # ------------------------------------------------------------ entries

    def _changed(
        self,
        kind: Kind,
        function: str,
        numbers: tuple[float | None, float],
        text: str,
        at_s: float,
        inputs: dict[str, float],
    ) -> None:
        """A number that changed; `numbers` are those before and after."""
        what = "cores" if kind == "cores" else "replicas"
        if self._is_news(function, what, numbers, at_s):
            self._add(kind, function, text, at_s, inputs, *numbers)

    def _is_news(self, name: str, what: str, value: object, at_s: float) -> bool:
        """Whether it was not stated a moment ago: then it did not arrive, and this is the same once more."""
        before = self._stated.get((name, what))
        self._stated[name, what] = (value, at_s)
        return before is None or before[0] != value or at_s - before[1] > AGAIN_S

    def _add(
        self,
        kind: Kind,
        function: str,
        text: str,
        at_s: float,
        inputs: dict[str, float],
        before: float | None = None,
        after: float | None = None,
    ) -> None:
        self._number += 1
        self._entries.append(
            DecisionReport(
                number=self._number,
                at_s=round(at_s, 3),
                function=function,
                kind=kind,
                text=text,
                before=before,
                after=after,
                inputs=inputs,
            )
        )


def key_count(stages: int) -> int:
    """How many of so many stages count as key stages."""
    return math.ceil(KEY_RATIO * stages)


def subjects_of(record: Record) -> dict[str, Subject]:
    """Every function of a snapshot by name."""
    return {subject.scale.function: subject for subject in _subjects(record)}


def _subjects(record: Record) -> Iterator[Subject]:
    for view in record.snapshot.pipelines:
        for stage in view.stages:
            yield Subject(f"stage {stage.stage}", stage.scale, stage, view)
    for scale in record.snapshot.functions:
        yield Subject(scale.function, scale)


def numbers_of(subject: Subject, told: Told | None) -> words.Numbers:
    """What the number of a function was decided by.

    A share of a single-pass stage is for wait and service, the model's time as well; sessions of a looping
    pipeline wait at its entry only, and their share is for that wait alone.
    """
    if told is None:
        return words.Numbers(ready=subject.scale.ready)
    service_s = words.known(told.service_s)
    is_looping = subject.pipeline is not None and subject.pipeline.execution == "looping"
    return words.Numbers(
        predicted_wait_s=_less(told.model_s, service_s),
        measured_wait_s=_less(told.sojourn_s, service_s),
        allowed_wait_s=words.known(told.share_s) if is_looping else _less(told.share_s, service_s),
        arrival_rps=words.known(told.arrival_rps),
        utilisation_ratio=None if is_looping else words.known(told.utilisation_ratio),
        ready=subject.scale.ready,
    )


def inputs_of(subject: Subject, told: Told | None, numbers: words.Numbers) -> dict[str, float]:
    """The numbers behind a decision, by name with unit; those that are not known are left out."""
    found: dict[str, float | None] = {"ready_replicas": subject.scale.ready}
    if told is not None:
        scv = words.known(told.arrival_scv)
        found |= {
            "wanted_replicas": told.wanted,
            "arrival_rps": numbers.arrival_rps,
            "arrival_cv": math.sqrt(scv) if scv is not None and scv >= 0 else None,
            "service_s": told.service_s,
            "predicted_wait_s": numbers.predicted_wait_s,
            "measured_wait_s": numbers.measured_wait_s,
            "allowed_wait_s": numbers.allowed_wait_s,
            "utilisation_ratio": told.utilisation_ratio,
            "queue_items": told.queue,
            "trim_nepers": told.trim or None,
        }
    loads = subject.scale.loads
    if loads is not None:
        found["in_flight_requests"] = sum(words.known(load.in_flight) or 0.0 for load in loads)
    return {name: number for name, value in found.items() if (number := words.short(value)) is not None}


def _less(value_s: float | None, service_s: float | None) -> float | None:
    """A sojourn without its service."""
    value_s = words.known(value_s)
    return None if value_s is None or service_s is None else max(0.0, value_s - service_s)


def _lack(record: Record, function: str) -> str:
    """What the placement could not find for a function, empty where there was room."""
    placement = record.decision.placement
    short: Sequence[str] = placement.short if placement is not None else ()
    found = next((text for text in short if text.startswith(f"{function}: ")), "")
    return found[len(function) + 2 :]

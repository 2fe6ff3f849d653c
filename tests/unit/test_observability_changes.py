"""The decision log over the real policy: an entry for a change, in words with its numbers, and none else."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from support.controller_records import decided, ticks
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import (
    ClearWake,
    Decision,
    KeyStage,
    LiftOverride,
    PlacementReport,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
    Site,
    StageReport,
)
from keystage.controller.domain.snapshot import (
    CpuView,
    FunctionView,
    GatewayLoad,
    Override,
    PipelineView,
    Slo,
    Snapshot,
    StageView,
)
from keystage.controller.domain.state import PolicyState
from keystage.observability.api import MOST_DECISIONS, DecisionReport
from keystage.observability.changes import AGAIN_S, Changes

CAUSE = re.compile(
    r"(predicted wait|measured wait|backlog of|fewer keep|to keep the wait|\d+ % of what|waits within)"
)


def told(replicas: int, reason: str, **numbers: float) -> StageReport:
    return StageReport(function="p-stage-0", replicas=replicas, wanted=replicas, reason=reason, **numbers)


def tick(
    *actions: Any,
    reason: str = "waits within 0.1 s",
    at_s: float = 100.0,
    execution: Any = "single-pass",
    before: PolicyState | None = None,
    placement: PlacementReport | None = None,
    numbers: dict[str, float] | None = None,
    **scale: Any,
) -> Record:
    """A tick of one stage, as scripted."""
    view = FunctionView(function="p-stage-0", **{"desired": 2, "ready": 2, **scale})
    stage = StageView(stage=0, scale=view, cpu=CpuView(1.0, 4.0))
    pipeline = PipelineView(pipeline="p", execution=execution, slo=Slo(), stages=(stage,))
    return Record(
        before=before or PolicyState(),
        snapshot=Snapshot(at_s=at_s, pipelines=(pipeline,)),
        decision=Decision(
            actions=actions,
            state=PolicyState(),
            reports=(told(4, reason, **(numbers or {})),),
            placement=placement,
        ),
    )


def noted(*records: Record) -> list[DecisionReport]:
    changes = Changes()
    for record in records:
        changes.note(record)
    return list(changes.newest())


def test_the_words_of_a_growing_stage() -> None:
    numbers = {"model_s": 0.33, "service_s": 0.02, "share_s": 0.1, "arrival_rps": 40.0, "arrival_scv": 4.0}
    (entry,) = noted(tick(SetReplicas("p-stage-0", 4), numbers=numbers))
    assert entry.text == "stage 0: 2 -> 4, predicted wait 310 ms > 80 ms"
    assert (entry.kind, entry.function, entry.before, entry.after) == ("replicas", "p-stage-0", 2, 4)
    assert entry.inputs == {
        "ready_replicas": 2.0,
        "wanted_replicas": 4.0,
        "arrival_rps": 40.0,
        "arrival_cv": 2.0,
        "service_s": 0.02,
        "predicted_wait_s": 0.31,
        "allowed_wait_s": 0.08,
    }


def test_a_looping_pipelines_share_is_for_the_wait_alone() -> None:
    numbers = {"model_s": 2.5, "service_s": 1.0, "share_s": 1.0}
    (entry,) = noted(tick(SetReplicas("p-stage-0", 4), execution="looping", numbers=numbers))
    assert entry.text == "stage 0: 2 -> 4, predicted wait 1.5 s > 1 s"


def test_places_and_missing_room_are_named() -> None:
    short = "p-stage-0: 1 of 2 new replicas have no place: 8 of 8 GPUs are held"
    placement = PlacementReport(regime="contended", why="", short=("p-stage-1: other", short))
    action = SetReplicas("p-stage-0", 4, (Site("n1"),))
    (entry,) = noted(tick(action, reason="backlog of 9", placement=placement))
    assert entry.text == (
        "stage 0: 2 -> 4, backlog of 9, on n1, 1 of 2 new replicas have no place: 8 of 8 GPUs are held"
    )


def test_a_first_decision_has_no_number_before() -> None:
    (entry,) = noted(tick(SetReplicas("p-stage-0", 1), desired=None, ready=1, reason="as it is"))
    assert (entry.text, entry.before, entry.after) == ("stage 0: 1 replica at first", None, 1)


def test_a_persons_request_and_its_end() -> None:
    override = Override(3, 200.0)
    asked = tick(SetReplicas("p-stage-0", 3), reason="override: 3", override=override)
    ended = tick(LiftOverride("p-stage-0"), at_s=201.0, override=override, desired=3)
    first, second = noted(asked, ended)
    assert (first.kind, first.text) == ("override", "stage 0: 2 -> 3, a person asked for 3")
    assert second.kind == "override"
    assert second.text == "stage 0: a person's request for 3 replicas has ended, the policy decides again"


def test_cores_and_key_stages() -> None:
    ranking = (KeyStage(2, 1.5), KeyStage(0, 0.5), KeyStage(1, math.inf))
    before = PolicyState(published={"p": (0, 1, 2)})
    cores, keys = noted(
        tick(SetCpu("p-stage-0", 2.5), reason="waits within 0.1 s; 2.5 cores"),
        tick(PublishKeyStages("p", ranking), ClearWake("p-stage-0"), before=before),
    )
    assert (cores.kind, cores.before, cores.after) == ("cores", 1.0, 2.5)
    assert cores.text == "stage 0: 1 -> 2.5 cores, waits within 0.1 s; 2.5 cores"
    assert (keys.kind, keys.function) == ("key-stages", "p")
    assert keys.text == "key stages in order: 2, 0, 1 (before: 0, 1, 2)"
    assert keys.inputs == {"stage_2_score_ratio": 1.5, "stage_0_score_ratio": 0.5}


def test_what_did_not_arrive_and_is_stated_again_is_one_change() -> None:
    ranking = (KeyStage(0, 1.0),)
    actions = (SetReplicas("p-stage-0", 4), PublishKeyStages("p", ranking))
    once = noted(*[tick(*actions, at_s=100.0 + 5 * k) for k in range(4)])
    assert [entry.kind for entry in once] == ["replicas", "key-stages"]
    again = noted(tick(*actions), tick(*actions, at_s=101.0 + AGAIN_S))
    assert [entry.kind for entry in again] == ["replicas", "key-stages"] * 2
    assert [entry.number for entry in again] == [1, 2, 3, 4]


def hold(reason: str, at_s: float) -> Record:
    return tick(reason=f"hold: {reason}" if reason else "waits within 0.1 s", at_s=at_s)


def test_a_hold_is_told_when_it_begins_and_when_its_reason_changes() -> None:
    entries = noted(
        hold("router p-1: timed out after 0.51 s", 100.0),
        hold("router p-1: timed out after 0.52 s", 160.0),  # the same, after a minute of the same
        hold("no service time known yet", 161.0),
        hold("", 162.0),
        hold("no service time known yet", 163.0),  # it flickers
        hold("", 164.0),
        hold("no service time known yet", 165.0 + AGAIN_S),
    )
    assert [(entry.at_s, entry.function, entry.kind) for entry in entries] == [
        (100.0, "p", "hold"),
        (161.0, "p", "hold"),
        (165.0 + AGAIN_S, "p", "hold"),
    ]
    assert entries[0].text == "holds all replica numbers: router p-1: timed out after 0.51 s"


def test_every_change_of_the_policy_is_an_entry_and_nothing_else_is() -> None:
    world = FluidWorld([FluidStage(0.02), FluidStage(0.005)])
    changes = Changes()
    asked: list[tuple[str, int | None, int]] = []
    rates = [20.0] * 80 + [150.0] * 120 + [5.0] * 400
    for record in ticks(world, rates):
        scales = {stage.scale.function: stage.scale for stage in record.snapshot.pipelines[0].stages}
        asked += [
            (action.function, scales[action.function].desired, action.replicas)
            for action in record.decision.actions
            if isinstance(action, SetReplicas)
        ]
        changes.note(record)
    entries = [entry for entry in changes.newest() if entry.kind == "replicas"]
    assert [(e.function, e.before, e.after) for e in entries] == asked
    grown = [e for e in entries if e.before is not None and e.after is not None and e.after > e.before]
    shrunk = [e for e in entries if e.before is not None and e.after is not None and e.after < e.before]
    assert grown
    assert shrunk
    for entry in grown + shrunk:
        stage = entry.function.rsplit("-", 1)[1]
        assert entry.text.startswith(f"stage {stage}: {entry.before:g} -> {entry.after:g}, ")
        assert CAUSE.search(entry.text), entry.text
        assert all(math.isfinite(value) for value in entry.inputs.values())
    assert any("predicted wait" in e.text or "% of what" in e.text or "backlog" in e.text for e in grown)


def test_a_plain_function_is_told_with_what_it_has_in_hand() -> None:
    loads = (GatewayLoad("a", 3, 5), GatewayLoad("b", math.nan, None), GatewayLoad("c", 2, 5))
    scale = FunctionView(function="f", ready=1, loads=loads)
    changes = Changes()
    changes.note(decided(Snapshot(at_s=1.0, functions=(scale,))))
    (entry,) = changes.newest()
    assert entry.text == "f: 1 replica at first"
    assert entry.inputs["in_flight_requests"] == 5.0


def test_the_newest_entries_are_kept() -> None:
    changes = Changes()
    for k in range(MOST_DECISIONS + 20):
        changes.note(tick(SetReplicas("p-stage-0", k + 1), at_s=100.0 + k, desired=k, ready=k))
    entries = changes.newest()
    assert len(entries) == MOST_DECISIONS
    assert entries[-1].number == MOST_DECISIONS + 20
    assert [e.number for e in entries] == list(range(21, MOST_DECISIONS + 21))


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_numbers_that_are_none_are_left_out(bad: float | None) -> None:
    numbers = dict.fromkeys(
        ("model_s", "service_s", "share_s", "arrival_rps", "arrival_scv", "sojourn_s", "queue"), bad
    )
    record = tick(SetReplicas("p-stage-0", 4))
    report = msgspec.structs.replace(record.decision.reports[0], **numbers)
    record = msgspec.structs.replace(
        record, decision=msgspec.structs.replace(record.decision, reports=(report,))
    )
    (entry,) = noted(record)
    assert entry.text == "stage 0: 2 -> 4, waits within 0.1 s"
    assert entry.inputs == {"ready_replicas": 2.0, "wanted_replicas": 4.0}


def test_a_tick_at_no_time_changes_nothing() -> None:
    assert noted(tick(SetReplicas("p-stage-0", 4), at_s=math.nan)) == []


def test_busy_workers_of_a_looping_stage_do_not_say_that_waits_grow() -> None:
    record = tick(SetReplicas("p-stage-0", 4))
    view = msgspec.structs.replace(record.snapshot.pipelines[0], execution="looping")
    told = msgspec.structs.replace(record.decision.reports[0], utilisation_ratio=1.0, model_s=None)
    (entry,) = noted(
        msgspec.structs.replace(
            record,
            snapshot=msgspec.structs.replace(record.snapshot, pipelines=(view,)),
            decision=msgspec.structs.replace(record.decision, reports=(told,)),
        )
    )
    assert "without bound" not in entry.text
    assert entry.inputs["utilisation_ratio"] == 1.0


def test_an_order_of_a_thousand_stages_has_few_words() -> None:
    ranking = tuple(KeyStage(k, 1.0) for k in range(1000))
    (entry,) = noted(tick(PublishKeyStages("p", ranking)))
    assert entry.text == "key stages in order: 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
    assert len(entry.inputs) == 8

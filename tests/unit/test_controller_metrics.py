"""What the controller shows of its decisions: held, key stages, kinds of changes."""

from __future__ import annotations

from support.controller_world import FluidStage, FluidWorld

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import Decision, SetReplicas
from keystage.controller.domain.snapshot import FunctionView, PipelineView, Slo, Snapshot, StageView
from keystage.controller.domain.state import PolicyState
from keystage.controller.metrics import Counts
from keystage.controller.policy.settings import PolicySettings
from keystage.wire.metrics import Sample


def heard(world: FluidWorld, counts: Counts, rate_rps: float, ticks: int) -> None:
    for _ in range(ticks):
        decision: Decision = world.step(rate_rps)
        counts.hear(Record(settings=PolicySettings(), snapshot=world.seen, decision=decision), "")


def found(counts: Counts, name: str, **labels: str) -> list[float]:
    return [s.value for s in counts.samples() if s.name == name and _has(s, labels)]


def _has(sample: Sample, labels: dict[str, str]) -> bool:
    return all(sample.labels.get(key) == value for key, value in labels.items())


def test_a_burst_is_seen_in_rate_cv_utilisation_and_in_the_key_stage() -> None:
    world = FluidWorld(
        stages=[FluidStage(service_s=0.01), FluidStage(service_s=0.2), FluidStage(service_s=0.01)]
    )
    counts = Counts()
    heard(world, counts, 20.0, 200)
    assert found(counts, "keystage_ticks") == [200]
    assert found(counts, "keystage_pipeline_held", pipeline="p") == [0.0]
    assert found(counts, "keystage_stage_is_key", stage="1") == [1.0]
    assert sum(found(counts, "keystage_stage_is_key")) == 1.0
    (rate_rps,) = found(counts, "keystage_stage_arrival_rps", stage="1")
    assert 10 < rate_rps < 40
    (cv,) = found(counts, "keystage_stage_arrival_cv", stage="0")
    assert cv >= 0
    (desired,) = found(counts, "keystage_stage_desired_replicas", stage="1")
    assert desired >= 4
    assert found(counts, "keystage_decisions", reason="scale-up")[0] >= 1
    assert found(counts, "keystage_decisions", reason="key-stages")[0] >= 1


def test_missing_statistics_are_a_hold_and_failures_are_counted() -> None:
    world = FluidWorld(stages=[FluidStage(service_s=0.1)])
    world.missing = "router p does not answer"
    counts = Counts()
    heard(world, counts, 1.0, 3)
    assert found(counts, "keystage_pipeline_held", pipeline="p") == [1.0]
    counts.hear(None, "cannot observe: no answer")
    assert found(counts, "keystage_platform_failures") == [1]
    assert found(counts, "keystage_ticks") == [3]


def test_numbers_that_are_stated_again_are_no_decisions() -> None:
    """After a start the controller states what there is; nothing has been scaled."""
    stage = StageView(stage=0, scale=FunctionView(function="p-stage-0", ready=1))
    view = PipelineView(pipeline="p", execution="looping", slo=Slo(), stages=(stage,))
    counts = Counts()
    for replicas in (1, 2, 0):
        decision = Decision(actions=(SetReplicas("p-stage-0", replicas),), state=PolicyState(), reports=())
        counts.hear(Record(snapshot=Snapshot(at_s=0.0, pipelines=(view,)), decision=decision), "")
    reasons = {s.labels["reason"]: s.value for s in counts.samples() if s.name == "keystage_decisions"}
    assert {reason: count for reason, count in reasons.items() if count} == {"scale-up": 1, "to-zero": 1}

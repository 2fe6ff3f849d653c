"""Parts of the policy: scale to zero and from zero, batches, graphs, quiet pipelines, effort, feedback."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.domain.decision import Decision, SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    FunctionView,
    Override,
    PipelineView,
    Slo,
    StageView,
)
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy import demand
from keystage.controller.policy.decide import decide
from keystage.controller.policy.service import service
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.shares import longest_s, predecessors, stage_shares_s, waiting_before

IDLE_S = 20.0


def numbers(decision: Decision) -> list[int]:
    return [r.replicas for r in decision.reports]


def sleepy(minimum: int = 0, **kwargs: object) -> FluidWorld:
    stages = [FluidStage(s, min_replicas=minimum) for s in (0.005, 0.01, 0.005)]
    return FluidWorld(stages, settings=PolicySettings(idle_s=IDLE_S), **kwargs)


def test_a_pipeline_goes_to_zero_after_a_while_and_not_before() -> None:
    world = sleepy()
    assert numbers(world.run(40, 20)) == [1, 1, 1]
    assert numbers(world.run(0, IDLE_S - 2)) == [1, 1, 1]
    assert numbers(world.run(0, 4)) == [0, 0, 0]
    assert numbers(world.run(0, 30)) == [0, 0, 0]


def test_minimum_one_never_goes_to_zero() -> None:
    world = sleepy(1)
    world.run(40, 20)
    assert numbers(world.run(0, 3 * IDLE_S)) == [1, 1, 1]


def test_the_zero_label_lets_a_stage_rest_below_its_minimum_after_its_own_time() -> None:
    world = sleepy(2)
    world.stages[0].zero_after_s, world.stages[2].zero_after_s = 5.0, 40.0
    world.run(40, 20)
    assert numbers(world.run(0, 4)) == [2, 2, 2]
    assert numbers(world.run(0, 4)) == [0, 2, 2]
    assert numbers(world.run(0, 26)) == [0, 2, 2]
    assert numbers(world.run(0, 9)) == [0, 2, 0]
    assert numbers(world.run(0, 60)) == [0, 2, 0]
    assert min(numbers(world.step(8))) >= 2


def test_the_first_request_brings_all_stages_up_in_one_tick() -> None:
    world = sleepy()
    world.run(40, 20)
    world.run(0, IDLE_S + 4)
    assert [s.desired for s in world.stages] == [0, 0, 0]
    decision = world.step(8)  # two items wait at stage 0; nothing has reached the others
    assert world.stages[0].queue > 0
    assert min(numbers(decision)) >= 1


def test_a_wake_at_one_stage_brings_all_up() -> None:
    world = sleepy()
    world.run(40, 20)
    world.run(0, IDLE_S + 4)
    seen = world.snapshot()
    view = seen.pipelines[0]
    woken = msgspec.structs.replace(
        view.stages[1], scale=msgspec.structs.replace(view.stages[1].scale, wake=True)
    )
    view = msgspec.structs.replace(view, stages=(view.stages[0], woken, view.stages[2]))
    later = msgspec.structs.replace(seen, at_s=seen.at_s + 0.25, pipelines=(view,))
    decision = decide(world.settings, later, world.state)
    assert {a.function for a in decision.actions if isinstance(a, SetReplicas)} == {
        "p-stage-0", "p-stage-1", "p-stage-2"
    }  # fmt: skip


def known(service_s: float, rows_rps: float | None = None) -> Estimates:
    return Estimates(
        service_s=service_s, capacity_rps=rows_rps or 1 / service_s, rows_rps=rows_rps, samples=100.0
    )


def test_batch_service_is_the_profile_at_todays_pace() -> None:
    profile = BatchProfile(0.01, 0.02, 8)
    fresh = service(PolicySettings(), profile, Estimates(service_s=0.03, capacity_rps=33.0))
    assert fresh.alone_s == pytest.approx(0.03)
    assert fresh.rps(8) == pytest.approx(8 / 0.1)
    assert fresh.batch_within(0.1) == 3  # l(3) = 0.05, half the share
    assert fresh.batch_within(0.01) == 1
    slow = service(PolicySettings(), profile, known(0.12, 4 / 0.12))  # batches of four take twice l(4)
    assert slow.rps(8) == pytest.approx(8 / 0.2)
    none = service(PolicySettings(), None, known(0.05))
    assert none.rps(1) == none.rps(5) == pytest.approx(20)


def stage(index: int, after: tuple[int, ...] | None = None) -> StageView:
    return StageView(stage=index, scale=FunctionView(function=f"p-stage-{index}"), after=after)


def test_the_deadline_is_divided_along_the_longest_path() -> None:
    diamond = [stage(0), stage(1, (0,)), stage(2, (0,)), stage(3, (1, 2))]
    graph = predecessors(diamond)
    assert graph == [(), (0,), (0,), (1, 2)]
    longest = longest_s(graph, [1.0, 3.0, 1.0, 1.0])
    assert longest == [5.0, 5.0, 3.0, 5.0]
    shares = stage_shares_s(10.0, longest, [1.0, 3.0, 1.0, 1.0])
    assert shares == pytest.approx([2.0, 6.0, 10 / 3, 2.0])
    assert waiting_before(graph, [1.0, 5.0, 2.0, 1.0]) == [1.0, 6.0, 3.0, 7.0]
    chain = predecessors([stage(k) for k in range(3)])
    assert chain == [(), (0,), (1,)]
    assert longest_s(chain, [1.0, 2.0, 3.0]) == [6.0, 6.0, 6.0]
    assert predecessors([stage(0, (1,)), stage(1, (1,))]) == [(), ()]  # edges backwards are not believed


def test_the_chain_capacity_meets_its_wait() -> None:
    for scv in (0.0, 1.0, 64.0):
        capacity = demand.pipeline_rps(100.0, scv, 0.2)
        assert (scv + 1) / 2 * 100 / (capacity * (capacity - 100)) == pytest.approx(0.2)
    assert demand.pipeline_rps(0.0, 1.0, 0.2) == 0.0


def test_a_burst_that_is_gone_before_a_replica_were_ready_asks_for_none() -> None:
    load = demand.Load(10.0, 1.0, 0.05, 1.0, 1, 8.0, 0.1)  # 20/s: 8 items more are gone in 0.8 s
    assert demand.for_backlog(load, 1, (), 0.0, start_s=1.0, drain_s=0.2, most=9) == 1
    assert demand.for_backlog(load, 1, (), 0.0, start_s=0.3, drain_s=0.2, most=9) > 1


def test_a_quiet_pipeline_is_passed_over_and_looked_at_again_in_time() -> None:
    world = FluidWorld([FluidStage(0.01), FluidStage(0.01)], slo=Slo(deadline_s=0.2))
    world.run(40, 20)
    looked = []
    for _ in range(60):
        decision = world.step(0)
        looked.append(decision.reports[0].reason != "nothing changed")
        assert numbers(decision) == [s.desired for s in world.stages]
    assert not all(looked[4:])
    ticks = round(world.settings.rest_s / 0.25) + 1
    assert all(any(looked[k : k + ticks]) for k in range(len(looked) - ticks))


def test_a_quiet_pipeline_gives_up_what_a_person_asks_for_elsewhere() -> None:
    world = FluidWorld([FluidStage(0.1), FluidStage(0.1)], slo=Slo(deadline_s=2.0))
    world.run(40, 20)
    held = [s.desired or 0 for s in world.stages]
    assert min(held) >= 4
    asked = FunctionView(function="q-stage-0", desired=1, ready=1, override=Override(6, world.now + 100))
    other = PipelineView(
        pipeline="q", execution="single-pass", slo=Slo(), stages=(StageView(stage=0, scale=asked),)
    )
    seen = []
    for _ in range(8):  # in one of these ticks the first pipeline has its turn, in the others it is quiet
        world.step(0)
        budget = sum(s.desired or 0 for s in world.stages) + 2
        snapshot = msgspec.structs.replace(
            world.seen, at_s=world.now + 0.1, pipelines=(*world.seen.pipelines, other), budget_replicas=budget
        )
        decision = decide(world.settings, snapshot, world.state)
        stated = {a.function: a.replicas for a in decision.actions if isinstance(a, SetReplicas)}
        assert stated["q-stage-0"] == 6
        assert sum(r.replicas for r in decision.reports) <= budget
        for report, stage in zip(decision.reports[:2], world.stages, strict=True):
            assert stated.get(report.function, stage.desired) == report.replicas  # what is told is stated
        if decision.reports[0].reason.startswith("nothing changed"):
            seen.append(
                min(
                    r.replicas - (s.desired or 0)
                    for r, s in zip(decision.reports, world.stages, strict=False)
                )
            )
            assert "p" not in decision.state.settled
    assert seen
    assert max(seen) < 0


@pytest.mark.parametrize("what", ["queue", "arrivals", "ready", "max_replicas"])
def test_a_change_is_looked_at_in_the_same_tick(what: str) -> None:
    for ticks in range(4):  # whatever the phase of the second
        world = FluidWorld([FluidStage(0.01), FluidStage(0.01)], slo=Slo(deadline_s=0.2))
        world.run(40, 20)
        world.run(0, 5 + ticks * world.tick_s)
        entry = world.stages[0]
        if what == "max_replicas":
            entry.max_replicas, entry.desired, entry.ready = 1, 2, 2
        elif what == "ready":
            entry.ready = 0
        else:
            setattr(entry, what, getattr(entry, what) + 50)
        assert world.step(0).reports[0].reason != "nothing changed"


def test_effort_and_feedback_are_what_they_say() -> None:
    totals = []
    for effort in (0.7, 1.0, 1.4, 2.0):
        world = FluidWorld(
            [FluidStage(0.02) for _ in range(6)], settings=PolicySettings(effort=effort), scv=4.0
        )
        totals.append(sum(numbers(world.run(200, 60))))
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]
    world = FluidWorld([FluidStage(0.02)], settings=PolicySettings(feedback=False))
    assert all(r.trim == 0 for r in world.run(100, 40).reports)
    assert math.isfinite(world.run(100, 1).reports[0].model_s or math.nan)

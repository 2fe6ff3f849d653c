"""Time lines of the policy: growth, dead time, giving back, holding, people, bounds, budget, key stages."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.domain.decision import (
    ClearWake,
    Decision,
    LiftOverride,
    PublishKeyStages,
    SetReplicas,
)
from keystage.controller.domain.snapshot import FunctionView, Override, Slo, Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings


def numbers(decision: Decision) -> list[int]:
    return [r.replicas for r in decision.reports]


def four(**kwargs: object) -> FluidWorld:
    return FluidWorld([FluidStage(s) for s in (0.005, 0.01, 0.005, 0.005)], **kwargs)


def test_quiet_pipeline_gets_one_replica_each_and_stays() -> None:
    world = four()
    assert numbers(world.run(10, 30)) == [1, 1, 1, 1]
    first = [a for a in world.history[0][1].actions if isinstance(a, SetReplicas)]
    assert len(first) == 4  # nobody had decided before
    assert not [a for _, d in world.history[1:] for a in d.actions if isinstance(a, SetReplicas)]


def test_backlog_is_answered_within_one_tick_at_this_stage_and_those_after_it() -> None:
    world = four()
    world.run(40, 20)
    world.stages[1].queue += 150
    decision = world.step(40)
    assert decision.reports[0].replicas == 1
    assert min(numbers(decision)[1:]) > 1
    assert decision.reports[1].reason.startswith("backlog")


def test_a_load_above_capacity_is_met() -> None:
    world = four()
    world.run(40, 10)
    assert min(numbers(world.run(330, 5))) >= 2
    assert numbers(world.run(330, 20))[1] >= 4


def test_a_long_start_is_not_asked_for_again_and_again() -> None:
    world = four(start_s=45.0)
    world.run(20, 30)
    asked = [max(numbers(world.step(130))) for _ in range(160)]  # 40 s: nothing has started yet
    assert world.stages[1].ready == 1
    assert max(asked) <= 8  # the backlog of 1,200 would ask for 107 within the deadline


def test_surplus_is_given_back_one_at_a_time_after_a_while() -> None:
    world = four()
    world.run(300, 20)
    high = world.stages[1].desired
    since = world.now
    world.run(30, 240)
    steps = [
        (at, a.replicas)
        for at, d in world.history
        for a in d.actions
        if at > since and isinstance(a, SetReplicas) and a.function == "p-stage-1"
    ]
    assert [r for _, r in steps] == list(range(high - 1, 0, -1))
    apart_s = world.settings.hold_s * world.settings.hold_next_ratio
    assert all(b[0] - a[0] >= apart_s for a, b in itertools.pairwise(steps))


def test_a_replica_the_rest_could_not_spare_is_kept() -> None:
    settings = PolicySettings(carry_ratio=0.5)
    world = four(settings=settings, slo=Slo(deadline_s=10.0))
    world.run(150, 15)
    assert world.stages[1].desired == 2
    world.run(60, 120)  # one replica would be 60 % busy, above 50 %
    assert world.stages[1].desired == 2


def test_replicas_that_have_not_started_go_first() -> None:
    world = four(start_s=20.0, settings=PolicySettings(hold_s=1.0, hold_start_ratio=0.1))
    world.run(40, 20)
    world.stages[1].queue += 4000  # twice what one replica works off before another is there
    world.step(40)
    assert world.stages[1].starting
    world.stages[1].queue = 0
    world.run(40, 4)
    assert not world.stages[1].starting
    assert world.stages[1].ready == 1


@pytest.mark.parametrize("missing", ["router p: timed out"])
def test_missing_statistics_hold_what_is(missing: str) -> None:
    world = four()
    world.run(300, 20)
    before = [s.desired for s in world.stages]
    world.missing = missing
    decision = world.run(300, 60)
    assert numbers(decision) == before
    assert decision.reports[1].reason.startswith("hold: router p: timed out")
    assert not decision.actions


def test_stale_statistics_hold_what_is() -> None:
    world = four()
    world.run(300, 60)  # nothing is about to be given back
    seen = world.snapshot()
    state = world.state
    for k in range(80):
        later = msgspec.structs.replace(seen, at_s=seen.at_s + k / 4)
        decision = decide(world.settings, later, state)
        state = decision.state
        assert numbers(decision) == [s.desired for s in world.stages]
    assert "stand still" in decision.reports[0].reason


def test_time_that_is_no_number_changes_nothing() -> None:
    state = PolicyState(published={"p": (1, 0)})
    assert decide(PolicySettings(), Snapshot(at_s=math.nan), state) == Decision(
        actions=(), state=state, reports=()
    )


def test_a_new_leader_starts_without_a_bump() -> None:
    world = four()
    world.run(60, 20)
    world.state = PolicyState()  # the old leader is gone; somebody had set five
    for s in world.stages:
        s.ready = s.desired = 5
    for _ in range(8):
        assert numbers(world.step(60)) == [5, 5, 5, 5]
    assert numbers(world.run(60, 200))[1] <= 2  # what it found fades


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_the_slow_stage_leads_the_key_stage_list(slow: int) -> None:
    world = FluidWorld([FluidStage(0.01 if k == slow else 0.005) for k in range(4)])
    world.run(80, 20)
    published = [a for _, d in world.history for a in d.actions if isinstance(a, PublishKeyStages)]
    assert published[-1].ranking[0].stage == slow
    assert len(published) <= 3


def test_an_override_wins_until_it_expires_and_is_lifted() -> None:
    world = four()
    world.run(20, 10)
    world.stages[2].override = Override(3, world.now + 5)
    decision = world.step(20)
    assert SetReplicas("p-stage-2", 3) in decision.actions
    assert decision.reports[2].reason == "override: 3"
    world.run(20, 4.5)
    assert world.stages[2].desired == 3
    decision = world.step(20)
    assert LiftOverride("p-stage-2") in decision.actions
    world.stages[2].override = None
    assert numbers(world.run(20, 60)) == [1, 1, 1, 1]


def test_an_override_of_zero_stops_a_stage_until_something_waits() -> None:
    world = four()
    world.run(20, 10)
    world.stages[0].override = Override(0, world.now + 500)
    world.run(0, 2)
    assert world.stages[0].desired == 0
    decision = world.run(20, 0.25)
    assert LiftOverride("p-stage-0") in decision.actions
    assert world.stages[0].desired is not None
    assert world.stages[0].desired >= 1


def test_labels_and_machine_bound_people_and_policy() -> None:
    world = four()
    world.stages[1].cap = 2
    world.stages[2].min_replicas, world.stages[2].max_replicas = 2, 3
    world.stages[2].override = Override(9, world.now + 100)
    decision = world.run(500, 20)
    assert numbers(decision)[1:3] == [2, 3]
    assert decision.reports[1].reason.endswith("at most 2: few cores")
    world.stages[2].override = Override(1, world.now + 100)
    assert numbers(world.step(500))[2] == 2


def test_the_budget_serves_minimums_then_people_then_key_stages() -> None:
    world = four(budget=7)
    decision = world.run(300, 20)
    assert numbers(decision) == [1, 3, 2, 1]  # the smallest part first; of equals the key stage's
    world.stages[3].override = Override(3, world.now + 100)
    decision = world.step(300)
    assert sum(numbers(decision)) == 7
    assert numbers(decision)[3] == 3
    assert "by budget 7" in decision.reports[1].reason


def plain(**kwargs: object) -> FunctionView:
    return msgspec.structs.replace(FunctionView(function="f", desired=2, ready=2), **kwargs)


@pytest.mark.parametrize(
    ("scale", "actions"),
    [
        (plain(), ()),
        (plain(desired=None, ready=0), (SetReplicas("f", 1),)),
        (plain(override=Override(4, 99.0)), (SetReplicas("f", 4),)),
        (plain(override=Override(4, 5.0)), (LiftOverride("f"),)),
        (plain(override=Override(0, 99.0)), (SetReplicas("f", 0),)),
        (plain(desired=0, ready=0, min_replicas=0), ()),
        (plain(desired=0, ready=0, min_replicas=0, wake=True), (SetReplicas("f", 1),)),
        (
            plain(desired=0, ready=0, wake=True, override=Override(0, 99.0)),
            (SetReplicas("f", 1), LiftOverride("f")),
        ),
        (plain(wake=True), (ClearWake("f"),)),
        (plain(max_replicas=1), (SetReplicas("f", 1),)),
    ],
)
def test_plain_functions_follow_intents_and_bounds(scale: FunctionView, actions: tuple[object, ...]) -> None:
    decision = decide(PolicySettings(), Snapshot(at_s=10.0, functions=(scale,)), PolicyState())
    assert decision.actions == actions


def looping(busy: list[float], **kwargs: object) -> FluidWorld:
    """Sessions of 2 s at entry; stage workers compute the given fraction of the time."""
    world = FluidWorld(
        [FluidStage(2.0) for _ in busy], execution="looping", slots=4, slo=Slo(ttft_s=1.0), **kwargs
    )
    world.busy = busy  # type: ignore[attr-defined]
    return world


def step_looping(world: FluidWorld, rate_rps: float, seconds: float) -> Decision:
    for _ in range(round(seconds / world.tick_s)):
        for s, busy in zip(world.stages, world.busy, strict=True):
            s.busy_s += 8 * busy * world.tick_s
        snap = _slotted(world, rate_rps)
        decision = decide(world.settings, snap, world.state)
        world.state = decision.state
    return decision


def _slotted(world: FluidWorld, rate_rps: float) -> Snapshot:
    """Arrivals at entry only; every session is served at once."""
    world.now += world.tick_s
    entry = world.stages[0]
    count = rate_rps * world.tick_s
    entry.arrivals += count
    entry.gap_s += world.tick_s
    entry.gap_s2 += 2 * world.tick_s / rate_rps
    entry.services += count
    entry.sojourn_s += count * 2.0
    return world.snapshot()


def test_looping_adds_slots_at_every_stage_that_is_short_of_them() -> None:
    decision = step_looping(looping([0.2, 0.3, 0.2]), 4.0, 90)  # 8 sessions at once, 4 slots
    assert min(numbers(decision)) >= 3
    assert len(set(numbers(decision))) == 1


def test_looping_grows_the_compute_bound_key_stage_alone() -> None:
    world = looping([0.3, 0.97, 0.3])
    decision = step_looping(world, 4.0, 90)
    assert numbers(decision)[0] == numbers(decision)[2] == 1
    assert numbers(decision)[1] > 1
    assert decision.reports[0].reason == "another stage is the key stage"
    # Busy time, not sessions a second over rows a second: that says next to nothing of a load.
    assert [report.utilisation_ratio for report in decision.reports] == pytest.approx([0.3, 0.97, 0.3])
    assert world.state.published["p"][0] == 1

"""Steps of `decide` that meet each other: cores after reclaiming, and dealing among pipelines at rest."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.controller_world import FluidStage, FluidWorld

from keystage.controller.domain.decision import Decision, SetCpu, SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    CpuView,
    GpuView,
    NodeView,
    Slo,
    Snapshot,
)
from keystage.controller.domain.state import PolicyState
from keystage.controller.maths import closed
from keystage.controller.policy import demand
from keystage.controller.policy.clamp import gpu_weight
from keystage.controller.policy.decide import decide
from keystage.controller.policy.demand import Load
from keystage.controller.policy.settings import PolicySettings

HELPS = CpuView(cores=1.0, most=4.0, per_core_s=0.002, low_s=0.0015, high_s=0.0025)


def seen_with(world: FluidWorld, **changes: object) -> Snapshot:
    """The world's next snapshot, every stage changed alike."""
    seen = world.snapshot()
    stages = tuple(msgspec.structs.replace(s, **changes) for s in seen.pipelines[0].stages)
    view = msgspec.structs.replace(seen.pipelines[0], stages=stages)
    return msgspec.structs.replace(seen, pipelines=(view,))


class CpuWorld(FluidWorld):
    """The same, with cores that can be set."""

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        stages = tuple(msgspec.structs.replace(s, cpu=HELPS) for s in seen.pipelines[0].stages)
        view = msgspec.structs.replace(seen.pipelines[0], stages=stages)
        return msgspec.structs.replace(seen, pipelines=(view,))


def test_all_stages_above_their_share_get_cores() -> None:
    """AllocateCPU as printed returns after the first stage; here three have cores."""
    world = CpuWorld([FluidStage(0.01, max_replicas=1) for _ in range(3)], slo=Slo(deadline_s=0.04))
    decision = world.run(60, 30)
    told = [a.function for a in decision.actions if isinstance(a, SetCpu)]
    assert told == ["p-stage-0", "p-stage-1", "p-stage-2"]


def reclaimed(is_compensated: bool) -> Decision:
    """A deadline that no cores reach, and a last stage with a surplus, whose own arrivals are bursty."""
    settings = PolicySettings(compensation=is_compensated, feedback=False)
    world = CpuWorld(
        [FluidStage(0.02) for _ in range(4)], slo=Slo(deadline_s=0.05), settings=settings, scv=-0.99
    )
    for tick in range(320):
        if tick == 319:
            world.stages[3].ready = world.stages[3].desired = 6
        world.stages[3].gap_s2 += 22.5 * 30 / 90**2
        decision = world.step(90)
    return decision


def test_a_reclaimed_replica_is_handed_back_where_cores_do_not_do() -> None:
    without, with_it = reclaimed(False).reports[3], reclaimed(True).reports[3]
    assert "reclaimed" in without.reason, without
    assert without.replicas < 6
    assert "one handed back: 4 cores would not do" in with_it.reason, with_it
    assert with_it.replicas == without.replicas + 1


def test_a_stage_without_known_memory_takes_whole_gpus() -> None:
    world = FluidWorld([FluidStage(0.01)])
    stage = world.snapshot().pipelines[0].stages[0]
    assert gpu_weight(msgspec.structs.replace(stage, gpus=2), 100) == 2
    assert gpu_weight(msgspec.structs.replace(stage, gpus=2, gpu_bytes=25), 100) == 0.5
    assert gpu_weight(msgspec.structs.replace(stage, gpus=-1, gpu_bytes=25), 100) == 0


def test_a_pipeline_at_rest_that_is_cut_is_told_so() -> None:
    """The budget shrinks below what stands: actions go out, and all are looked at."""
    world = FluidWorld([FluidStage(0.01, ready=3, desired=3), FluidStage(0.01)])
    world.step(20)
    seen = msgspec.structs.replace(world.snapshot(), budget_replicas=2, at_s=world.now + 0.25)
    decision = decide(world.settings, seen, world.state)
    assert SetReplicas("p-stage-0", 1) in decision.actions
    gpus = NodeView(node="n", gpus=(GpuView(100, 100), GpuView(100, 100)))
    seen = msgspec.structs.replace(seen_with(world, gpus=1), nodes=(gpus,), at_s=world.now + 0.25)
    decision = decide(world.settings, seen, world.state)
    told = {a.function: a.replicas for a in decision.actions if isinstance(a, SetReplicas)}
    assert told == {"p-stage-0": 1}


@pytest.mark.parametrize(
    ("changes", "slo"),
    [
        ({}, Slo(deadline_s=1.7e308)),
        ({"profile_s": 1e300}, None),
    ],
)
def test_what_cannot_be_believed_is_held(changes: dict[str, object], slo: Slo | None) -> None:
    world = FluidWorld([FluidStage(0.01), FluidStage(0.01)])
    if slo is not None:
        world.run(20, 10)
        world.slo = slo
        decision = world.step(20)
    else:
        decision = decide(world.settings, seen_with(world, **changes), world.state)
    assert [r.replicas for r in decision.reports] == [s.desired or 1 for s in world.stages]
    assert all(r.reason.startswith("hold") for r in decision.reports)


@pytest.mark.parametrize("execution", ["looping", "single-pass"])
def test_garbled_numbers_have_an_answer(execution: str) -> None:
    world = FluidWorld([FluidStage(0.01), FluidStage(0.01)], execution=execution)
    world.run(20, 10)
    for slots in (math.inf, 1e308, math.nan, 2.0**62):
        for batch in (None, BatchProfile(1e307, 0.0, 2**62), BatchProfile(math.nan, math.nan, 4)):
            for ready in (1, 2**62):
                seen = seen_with(world, batch=batch, cpu=CpuView(1e-320, math.inf, 1e308, 1.0, 2.0))
                stages = tuple(
                    msgspec.structs.replace(
                        s,
                        scale=msgspec.structs.replace(s.scale, ready=ready),
                        workers=tuple(msgspec.structs.replace(w, slots=slots) for w in s.workers),
                    )
                    for s in seen.pipelines[0].stages
                )
                view = msgspec.structs.replace(seen.pipelines[0], stages=stages)
                world.now += 0.25
                answer = decide(world.settings, Snapshot(at_s=world.now, pipelines=(view,)), world.state)
                assert all(1 <= r.replicas <= 20 for r in answer.reports)


def test_a_pipeline_without_stages_has_no_actions() -> None:
    world = FluidWorld([])
    for execution in ("looping", "single-pass"):
        view = msgspec.structs.replace(world.snapshot().pipelines[0], execution=execution)
        empty = decide(PolicySettings(), Snapshot(at_s=1.0, pipelines=(view,)), PolicyState())
        assert empty.actions == ()


def test_the_closed_model_agrees_with_the_demand_for_slots() -> None:
    load = Load(4.0, 2.0, 2.0, 1.0, 4, 0.0, 0.5)
    need = demand.for_wait(load, 100)
    waits_s = [closed.entry_wait_s(4.0, 2.0, n, 4, 2.0, 1.0) for n in (need, need - 1)]
    assert waits_s[0] <= 0.5 < waits_s[1]

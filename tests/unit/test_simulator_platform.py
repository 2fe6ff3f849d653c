"""The simulated world as a platform: intents on stage functions, cached views, its end."""

from __future__ import annotations

import pytest
from support.simulated_worlds import BY_SOURCE, gpu_stage, line, server, world

from keystage.controller.domain.decision import (
    ClearWake,
    KeyStage,
    LiftOverride,
    PublishKeyStages,
    SetCpu,
    SetReplicas,
)
from keystage.controller.domain.platform import PlatformError
from keystage.controller.domain.snapshot import FunctionView, Override, Slo, Snapshot
from keystage.simulator.api import StageSpec
from keystage.simulator.platform import SimulatedPlatform


def scale_of(snapshot: Snapshot, k: int = 0) -> FunctionView:
    return snapshot.pipelines[0].stages[k].scale


def test_a_pipeline_is_seen_as_described() -> None:
    stage = StageSpec(alpha_s=0.1, min_replicas=2, max_replicas=7, replicas=3)
    spec = line(stage, gpu_stage(), slo=Slo(deadline_s=2.0), function="p")
    platform = SimulatedPlatform(world(spec, nodes=(server(),), load=BY_SOURCE, budget_replicas=9), 1)
    snapshot = platform.observe()
    (pipeline,) = snapshot.pipelines
    assert (pipeline.pipeline, pipeline.execution, pipeline.slo.deadline_s) == ("p", "single-pass", 2.0)
    assert (pipeline.missing, snapshot.budget_replicas) == ("", 9)
    assert [s.scale.function for s in pipeline.stages] == ["p-stage-0", "p-stage-1"]
    scale = pipeline.stages[0].scale
    assert (scale.desired, scale.ready, scale.min_replicas, scale.max_replicas) == (None, 3, 2, 7)
    assert pipeline.stages[1].start_s == 5.5  # as from disk, until one was measured
    assert [f.function for f in snapshot.functions] == ["p"]
    assert [(n.node, len(n.gpus), n.cores_free) for n in snapshot.nodes] == [("node-0", 4, 12.0)]
    assert snapshot.nodes[0].on_disk == {"p-stage-0", "p-stage-1"}


def test_intents_on_a_stage_are_seen_and_lifted() -> None:
    platform = SimulatedPlatform(world(line(gpu_stage(), function="p")), 1, epoch_s=1000.0)
    for name in ("p-stage-0", "p"):
        platform.intend(name, override=Override(3, 1100.0), wake=True)
    snapshot = platform.observe()
    assert snapshot.at_s == 1000.0
    for scale in (scale_of(snapshot), snapshot.functions[0]):
        assert scale.override == Override(3, 1100.0)
        assert scale.wake
    for name in ("p-stage-0", "p"):
        platform.apply([LiftOverride(name), ClearWake(name)])
    snapshot = platform.observe()
    for scale in (scale_of(snapshot), snapshot.functions[0]):
        assert scale.override is None
        assert not scale.wake


def test_a_request_wakes_a_stage_at_zero() -> None:
    platform = SimulatedPlatform(world(line(gpu_stage(), times_s=(5.0,))), 1)
    platform.apply([SetReplicas("p-stage-0", 0)])
    platform.advance(4.0)
    assert not scale_of(platform.observe()).wake
    platform.advance(6.0)
    assert scale_of(platform.observe()).wake
    platform.apply([SetReplicas("p-stage-0", 1), ClearWake("p-stage-0")])
    platform.advance(9.0)
    assert not scale_of(platform.observe()).wake
    assert platform.is_served


def test_a_looping_pipeline_wakes_every_stage_a_session_waits_for() -> None:
    spec = line(gpu_stage(), gpu_stage(), times_s=(1.0,), execution="looping", steps=2)
    platform = SimulatedPlatform(world(spec), 1)
    platform.apply([SetReplicas("p-stage-1", 0)])
    platform.advance(2.0)
    snapshot = platform.observe()
    assert [scale_of(snapshot, k).wake for k in range(2)] == [False, True]
    platform.apply([SetReplicas("p-stage-1", 1)])
    platform.advance(3.0)
    assert platform.is_served


def test_actions_are_idempotent_and_unknown_names_do_nothing() -> None:
    platform = SimulatedPlatform(world(line(gpu_stage()), nodes=(server(),), load=BY_SOURCE), 1)
    actions = [
        SetReplicas("p-stage-0", 3),
        SetReplicas("gone", 3),
        SetCpu("p-stage-0", 2.0),
        SetCpu("gone", 2.0),
        PublishKeyStages("p", (KeyStage(0, 1.0), KeyStage(-1, 0.5), KeyStage(9, 0.1))),
        PublishKeyStages("gone", ()),
        LiftOverride("gone"),
        ClearWake("gone"),
    ]
    platform.apply(actions)
    first = platform.observe()
    platform.apply(actions)
    assert platform.observe() == first
    assert len(scale_of(first).starting) == 2


def test_what_did_not_change_is_the_same_object_again() -> None:
    platform = SimulatedPlatform(world(line(gpu_stage(), gpu_stage()), nodes=(server(2),), load=BY_SOURCE), 1)
    before = platform.observe()
    platform.apply([SetReplicas("p-stage-0", 2)])
    after = platform.observe()
    assert scale_of(before, 1).placed is scale_of(after, 1).placed
    assert scale_of(before).placed != scale_of(after).placed
    assert sum(a is b for a, b in zip(before.nodes, after.nodes, strict=True)) == 1


def test_a_world_that_has_ended_is_a_platform_error() -> None:
    platform = SimulatedPlatform(world(line(gpu_stage())), 1)
    assert platform.close() == ""
    with pytest.raises(PlatformError, match="has ended"):
        platform.observe()
    with pytest.raises(PlatformError, match="has ended"):
        platform.apply([])

"""A controller that starts anew gives back the cores that its predecessor raised."""

from __future__ import annotations

import pytest

from keystage.controller.domain.snapshot import CpuView, FunctionView, PipelineView, Slo, StageView
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.compensator import compensate
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec, World
from keystage.simulator.platform import SimulatedPlatform


@pytest.mark.parametrize(("base", "cores"), [(1.0, 1.0), (2.0, 2.0), (None, None), (float("nan"), None)])
def test_raised_cores_are_given_back_down_to_those_deployed(base: float | None, cores: float | None) -> None:
    known = Estimates(
        arrival_rps=1.0, arrival_slow_rps=1.0, arrival_scv=1.0, service_s=0.04, service_scv=1.0,
        capacity_rps=25.0,
    )  # fmt: skip
    quiet = Plan(
        scale=FunctionView(function="p-stage-0", desired=1, ready=1), wanted=1, reason="r", is_stage=True,
        pipeline="p", corrected=1, share_s=1.0, known=known,
    )  # fmt: skip
    raised = CpuView(cores=4.0, most=4.0, per_core_s=0.02, low_s=0.015, high_s=0.025, base=base)
    stage = StageView(stage=0, scale=quiet.scale, cpu=raised)
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(), stages=(stage,))
    (done,) = compensate(PolicySettings(), view, [quiet])  # no memory: just started
    assert done.cores == cores


def test_the_simulated_world_tells_cores_as_deployed() -> None:
    spec = StageSpec(alpha_s=0.01, cpu_core_s=0.02, cores=1.5, most_cores=4.0)
    pipeline = PipelineSpec(name="p", stages=(spec,), arrivals=ArrivalSpec(rate_rps=1.0, count=5))
    world = SimulatedPlatform(World(pipelines=(pipeline,)), 1)
    try:
        cpu = world.observe().pipelines[0].stages[0].cpu
        assert cpu is not None
        assert (cpu.cores, cpu.base) == (1.5, 1.5)
    finally:
        world.close()

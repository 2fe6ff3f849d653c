"""The smoother on single pipelines: what it takes back, and what it leaves alone."""

from __future__ import annotations

import msgspec
import pytest

from keystage.controller.domain.snapshot import FunctionView, PipelineView, Slo, StageView
from keystage.controller.maths.estimator import Estimates
from keystage.controller.policy.plan import Plan
from keystage.controller.policy.settings import PolicySettings
from keystage.controller.policy.smoother import predicted_scv, smooth, weight

SETTINGS = PolicySettings()
CALM = 0.01
BURSTS = 64.0


def pipeline(
    wanted: list[int],
    *,
    needs: list[int] | None = None,
    scv: float = CALM,
    rate_rps: float = 10.0,
    service_s: float = 0.1,
    queues: list[float] | None = None,
    ranks: list[int] | None = None,
    execution: str = "single-pass",
    **scale: object,
) -> tuple[PipelineView, list[Plan]]:
    """Stages of one service time that have these replicas; the first is the key stage by default."""
    functions = [FunctionView(function=f"p-stage-{k}", desired=w, ready=w) for k, w in enumerate(wanted)]
    functions = [msgspec.structs.replace(f, **scale) for f in functions]
    plans = [
        Plan(
            scale=functions[k],
            wanted=w,
            corrected=(needs or [1] * len(wanted))[k],
            reason="as told",
            is_stage=True,
            pipeline="p",
            stage=k,
            rank=(ranks or list(range(len(wanted))))[k],
            share_s=10 * service_s,
            known=Estimates(
                arrival_rps=rate_rps,
                arrival_slow_rps=rate_rps,
                arrival_scv=scv,
                service_s=service_s,
                service_scv=0.0,
                capacity_rps=1 / service_s,
                queue=(queues or [0.0] * len(wanted))[k],
            ),
        )
        for k, w in enumerate(wanted)
    ]
    stages = tuple(StageView(stage=k, scale=f) for k, f in enumerate(functions))
    view = PipelineView(pipeline="p", execution=execution, slo=Slo(deadline_s=1.0), stages=stages)  # type: ignore[arg-type]
    return view, plans


def numbers(view: PipelineView, plans: list[Plan], settings: PolicySettings = SETTINGS) -> list[int]:
    return [p.wanted for p in smooth(settings, view, plans)]


def test_a_calm_stage_gives_back_what_its_neighbours_cannot_fill():
    view, plans = pipeline([2, 2, 8, 2])
    assert numbers(view, plans) == [2, 2, 3, 2]


def test_under_bursts_nothing_is_given_away():
    view, plans = pipeline([2, 2, 8, 2], scv=BURSTS)
    assert numbers(view, plans) == [2, 2, 8, 2]


def test_the_equation_as_printed_raises_neighbours_and_the_total():
    """QUART Eq. 7 at beta 0.5 on [2, 8, 2, 2]: 15.5 out of 14. Ours never rises anywhere."""
    y = [2.0, 8.0, 2.0, 2.0]
    around = [[y[j] for j in (i - 1, i + 1) if 0 <= j < 4] for i in range(4)]
    printed = [0.5 * own + 0.5 * sum(n) / len(n) for own, n in zip(y, around, strict=True)]
    assert sum(printed) == pytest.approx(15.5)
    assert printed[0] > y[0]
    view, plans = pipeline([2, 8, 2, 2], scv=1.0, ranks=[0, 3, 2, 1])
    ours = numbers(view, plans)
    assert all(now <= before for now, before in zip(ours, [2, 8, 2, 2], strict=True))
    assert sum(ours) < 14


def test_unequal_stages_are_compared_by_head_room():
    """Four times the service time needs four times the replicas: equal head-room, nothing to take back."""
    view, plans = pipeline([2, 8, 2])
    slow = msgspec.structs.replace(plans[1].known, service_s=0.4, capacity_rps=2.5)
    plans[1] = msgspec.structs.replace(plans[1], known=slow, share_s=4.0, rank=2)
    assert numbers(view, plans) == [2, 8, 2]


def test_key_stages_are_left_alone():
    """A third of the stages, rounded up: of four the first two in the list."""
    view, plans = pipeline([2, 2, 8, 8], ranks=[2, 3, 0, 1])
    assert numbers(view, plans) == [2, 2, 8, 8]


def test_a_stage_keeps_what_the_stages_in_front_deliver_while_they_have_a_backlog():
    view, plans = pipeline([6, 6, 8, 2], queues=[0, 0, 0, 0], ranks=[0, 1, 2, 3])
    view2, plans2 = pipeline([6, 6, 8, 2], queues=[40, 0, 0, 0], ranks=[0, 1, 2, 3])
    assert numbers(view, plans)[2] < 6
    assert numbers(view2, plans2)[2] == 6


def test_minimums_hold():
    view, plans = pipeline([2, 2, 8, 2], min_replicas=5)
    assert numbers(view, plans)[2] == 5


def test_one_replica_above_the_corrected_need_is_left_to_the_damping():
    view, plans = pipeline([2, 2, 8, 2], needs=[1, 1, 6, 1])
    assert numbers(view, plans)[2] == 7
    view, plans = pipeline([2, 2, 8, 2], needs=[1, 1, 7, 1])
    assert numbers(view, plans)[2] == 8


def test_the_rest_carries_the_load():
    """At 10 items/s of 0.1 s two replicas are 50 % busy; one would be full."""
    view, plans = pipeline([1, 1, 3, 1], needs=[0, 0, 0, 0])
    assert numbers(view, plans)[2] == 2


def test_people_and_idle_pipelines_are_left_alone():
    view, plans = pipeline([2, 2, 8, 2])
    for change in ({"is_override": True}, {"is_idle": True}):
        kept = [msgspec.structs.replace(p, **change) for p in plans]
        assert numbers(view, kept) == [2, 2, 8, 2]


def test_off_and_rings_pass_as_they_are():
    view, plans = pipeline([2, 2, 8, 2])
    off = msgspec.structs.replace(SETTINGS, smoothing="off")
    assert smooth(off, view, plans) == plans
    assert predicted_scv(off, view, plans) == [None] * 4
    view, plans = pipeline([2, 2, 8, 2], execution="looping")
    assert smooth(SETTINGS, view, plans) == plans


def test_a_graph_that_is_no_chain_passes_as_it_is():
    view, plans = pipeline([2, 2, 8, 2])
    assert smooth(SETTINGS, view, plans) != plans
    forked = tuple(msgspec.structs.replace(s, after=(0,) if s.stage else ()) for s in view.stages)
    assert smooth(SETTINGS, msgspec.structs.replace(view, stages=forked), plans) == plans


def test_held_stages_pass_as_they_are():
    view, plans = pipeline([2, 2, 8, 2])
    plans[3] = msgspec.structs.replace(plans[3], is_held=True)
    assert smooth(SETTINGS, view, plans) == plans


@pytest.mark.parametrize("share_s", [None, -1.0, float("nan")])
def test_a_share_that_is_no_time_leaves_a_pipeline_alone(share_s):
    view, plans = pipeline([2, 2, 8, 2])
    plans[2] = msgspec.structs.replace(plans[2], share_s=share_s)
    assert smooth(SETTINGS, view, plans) == plans


@pytest.mark.parametrize("smoothing", ["qna", "attention"])
def test_plans_tell_the_predicted_variation(smoothing):
    settings = msgspec.structs.replace(SETTINGS, smoothing=smoothing)
    view, plans = pipeline([3, 3, 3, 3], scv=16.0)
    cvs = [p.cv for p in smooth(settings, view, plans)]
    assert cvs[0] == pytest.approx(4.0)
    assert all(cv is not None and 1 < cv < 4 for cv in cvs[1:])


def test_nothing_is_predicted_where_nothing_can_be_reclaimed():
    view, plans = pipeline([3, 3, 3, 3], needs=[2, 2, 2, 2], scv=16.0)  # one more than needed is left alone
    assert smooth(SETTINGS, view, plans) == plans


def test_beta_rises_with_the_variation_from_0_to_1():
    values = [weight(scv) for scv in (0.0, 0.01, 1.0, 16.0, 64.0, 1e4)]
    assert values == sorted(values)
    assert values[0] == 0
    assert values[-1] == pytest.approx(1, abs=1e-3)

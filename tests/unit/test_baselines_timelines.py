"""Time lines of the rivals, computed by hand."""

from __future__ import annotations

import math

import pytest
from support.baseline_views import ONE_S, TENTH, seen, snapshot, stage

from keystage.baselines.bounds import actions, bounded, fit
from keystage.baselines.envelope import ArrivalLog, widths
from keystage.baselines.inferline import (
    InferLine,
    InferLineSettings,
    Plan,
    scale_down,
    scale_up,
)
from keystage.baselines.planner import pass_stage, plan
from keystage.baselines.seen import Watch, batch_within, deadline_s
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    FunctionView,
    GpuView,
    NodeView,
    Override,
    PipelineView,
    Slo,
    Snapshot,
)


class TestSeen:
    def test_counts_growth_over_a_restart_of_the_router(self) -> None:
        watch = Watch()
        totals = []
        for arrivals, incarnation in ((5.0, "a"), (8.0, "a"), (3.0, "b"), (7.0, "b")):
            view = snapshot(0.0, stage(arrivals=arrivals, incarnation=incarnation)).pipelines[0]
            found = watch.see(view)
            assert found is not None
            totals.append(found[0].arrivals)
        assert totals == [0.0, 3.0, 3.0, 7.0]

    @pytest.mark.parametrize("bad", [None, math.nan, math.inf])
    def test_a_missing_counter_hides_the_whole_pipeline(self, bad: float | None) -> None:
        view = snapshot(0.0, stage(0), stage(1, arrivals=bad)).pipelines[0]
        assert Watch().see(view) is None

    def test_service_time_is_measured_where_no_profile_tells_it(self) -> None:
        watch = Watch()
        assert watch.see(snapshot(0.0, stage(batch=None)).pipelines[0]) is None
        found = watch.see(snapshot(1.0, stage(batch=None, services=4.0)).pipelines[0])
        assert found is not None
        assert found[0].item_s == pytest.approx(0.1)

    def test_largest_batch_within_a_time(self) -> None:
        profile = BatchProfile(alpha_s=0.1, beta_s=0.2, most=4)
        assert [batch_within(profile, limit_s) for limit_s in (0.1, 0.3, 0.45, 0.5, 9.0)] == [1, 1, 2, 3, 4]

    def test_objective_is_the_deadline_then_the_ttft_then_a_multiple_of_the_service(self) -> None:
        def of(slo: Slo) -> float:
            view = PipelineView(pipeline="p", execution="single-pass", slo=slo, stages=(stage(),))
            return deadline_s(view, (seen(),), 10.0)

        assert of(Slo(deadline_s=3.0, ttft_s=1.0)) == 3.0
        assert of(Slo(ttft_s=1.0)) == 1.0
        assert of(Slo()) == pytest.approx(1.0)


class TestBounds:
    def test_labels_and_the_machine_bound_a_wish(self) -> None:
        scale = FunctionView(function="f", min_replicas=2, max_replicas=9, cap=5)
        assert [bounded(scale, wanted) for wanted in (0.2, 2.0, 3.0000000001, 3.2, 40.0, math.inf)] == [
            2, 2, 3, 4, 5, 5,
        ]  # fmt: skip

    def test_what_does_not_fit_is_shared_in_proportion_beyond_the_minimum(self) -> None:
        assert fit([3, 4], [1, 1], [1, 1], 8) == [3, 4]
        # 10 places, 2 for the minima; 8 shared 9 : 3 is 6 and 2
        assert fit([10, 4], [1, 1], [1, 1], 10) == [7, 3]
        # instances of 3 GPUs: 12 GPUs are 4 of them
        assert fit([9], [1], [3], 12) == [4]
        # one that needs no GPU is not cut
        assert fit([9, 50], [1, 1], [3, 0], 12) == [4, 50]

    def test_a_cluster_bounds_instances_by_what_a_node_holds(self) -> None:
        node = NodeView(node="n", gpus=(GpuView(10, 10),) * 4)
        of_three = seen(gpus=3, gpu_bytes=10)
        state = Snapshot(at_s=0.0, nodes=(node, node))
        assert actions(state, [(of_three, 9)]) == [SetReplicas(function="p-stage-0", replicas=2)]
        shared = seen(gpus=1, gpu_bytes=5)
        assert actions(state, [(shared, 99)]) == [SetReplicas(function="p-stage-0", replicas=16)]

    def test_a_persons_request_goes_first_until_it_expires(self) -> None:
        scale = FunctionView(function="p-stage-0", desired=1, override=Override(4, expires_at_s=10.0))
        assert actions(Snapshot(at_s=9.0), [(seen(scale), 2)])[0].replicas == 4
        assert actions(Snapshot(at_s=10.0), [(seen(scale), 2)])[0].replicas == 2

    def test_no_action_without_a_change(self) -> None:
        assert actions(Snapshot(at_s=0.0), [(seen(), 1)]) == []

    def test_replicas_in_all_are_bounded(self) -> None:
        other = seen(FunctionView(function="q", desired=1), function="q")
        got = actions(Snapshot(at_s=0.0, budget_replicas=6), [(seen(), 8), (other, 4)])
        assert sum(a.replicas for a in got) == 6


class TestEnvelope:
    def test_widths_double_from_the_service_time(self) -> None:
        assert widths(0.4, 4.0, 0.5) == (0.5, 1.0, 2.0, 4.0)
        assert widths(9.0, 4.0, 0.5) == (4.0,)

    def test_counts_rates_and_peaks(self) -> None:
        log = ArrivalLog(100.0)
        for second, total in enumerate([0, 1, 2, 10, 11, 12, 12]):
            log.add(float(second), float(total))
        log.add(6.0, 99.0)  # time does not advance: dropped
        assert log.count(2.0, 4.0) == 9.0
        assert log.rates((1.0, 2.0), 3.0) == (8.0, 4.5)
        assert log.envelope((1.0, 2.0, 50.0)) == (8.0, 4.5, 2.0)  # the widest has the mean rate
        assert log.peak_rps(0.0, 6.0, 2.0) == 4.5  # windows 4-6, 2-4, 0-2: 1, 9, 2 arrivals
        assert log.peak_rps(5.0, 6.0, 2.0) == 0.0

    def test_arrival_times_are_spread_within_a_look(self) -> None:
        log = ArrivalLog(100.0)
        for at_s, total in ((0.0, 0.0), (1.0, 2.0), (2.0, 2.0), (3.0, 3.0)):
            log.add(at_s, total)
        assert log.times(0.0) == ([0.5, 1.0, 3.0], 3.0)

    def test_what_is_older_than_asked_back_is_forgotten(self) -> None:
        log = ArrivalLog(10.0)
        for tick in range(1000):
            log.add(tick * 0.25, float(tick))
        assert len(log.looks[0]) < 150
        assert log.count(249.75 - 10.0, 249.75) == 40.0


class TestInferLine:
    def test_a_stage_takes_what_waits_up_to_its_largest_batch(self) -> None:
        profile = BatchProfile(alpha_s=0.0, beta_s=1.0, most=2)
        arrivals = [(0.0, 0), (0.1, 1), (0.2, 2), (0.3, 3)]
        done, wait_s = pass_stage(arrivals, 1, profile)
        assert done == [(1.0, 0), (2.0, 1), (2.0, 2), (3.0, 3)]
        assert wait_s == pytest.approx((0.0 + 0.9 + 0.8 + 1.7) / 4)
        done, wait_s = pass_stage(arrivals, 4, profile)
        assert [end_s for end_s, _ in done] == pytest.approx([1.0, 1.1, 1.2, 1.3])
        assert wait_s == 0.0

    def test_the_plan_is_the_cheapest_that_meets_the_objective(self) -> None:
        # Three at once every ten seconds: with k servers of one second the last waits ceil(3 / k) - 1 s.
        sample = [t for burst in range(10) for t in [burst * 10.0] * 3]
        for slo_s, replicas in ((3.0, 1), (2.0, 2), (1.0, 3)):
            planned = plan(sample, [ONE_S], [8], slo_s)
            assert planned is not None
            assert (planned.replicas, planned.p99_s, planned.is_feasible) == ((replicas,), slo_s, True)

    def test_an_impossible_objective_is_replaced_by_what_can_be_reached(self) -> None:
        planned = plan([0.0, 10.0], [ONE_S, ONE_S], [4, 4], 0.5)
        assert planned is not None
        assert (planned.replicas, planned.p99_s, planned.is_feasible) == ((1, 1), 2.0, False)
        assert plan([], [ONE_S], [4], 1.0) is None

    def test_only_the_slow_stage_gets_replicas(self) -> None:
        slow = BatchProfile(alpha_s=0.4, beta_s=0.0, most=1)
        sample = [i * 0.2 for i in range(200)]
        planned = plan(sample, [TENTH, slow, TENTH], [8, 8, 8], 0.6 + 1e-6)
        assert planned is not None
        assert planned.replicas == (1, 2, 1)

    def test_scale_up_formula(self) -> None:
        planned = Plan(rate_rps=10.0, rates_rps=(20.0, 10.0), replicas=(2, 4))
        mu = (10.0, 5.0)
        assert planned.rho(mu) == (0.5, 0.5)
        assert scale_up(planned, (20.0, 10.0), mu, 1.0, by_envelope=False) is None
        # r_max = 30: 30 / (10 x 0.5) = 6 and 30 / (5 x 0.5) = 12
        assert scale_up(planned, (30.0, 12.0), mu, 1.0, by_envelope=False) == pytest.approx((6.0, 12.0))
        # worst ratio 30 / 20 = 1.5
        assert scale_up(planned, (30.0, 12.0), mu, 1.0, by_envelope=True) == pytest.approx((3.0, 6.0))
        assert scale_up(planned, (30.0, 12.0), mu, 2.0, by_envelope=True) == pytest.approx((6.0, 12.0))

    def test_scale_down_uses_the_lowest_utilisation_of_the_plan(self) -> None:
        planned = Plan(rate_rps=10.0, rates_rps=(20.0,), replicas=(2, 3))
        # rho 0.5 and 2/3 at mu 10 and 5: 4 / (10 x 0.5) and 4 / (5 x 0.5)
        assert scale_down(planned, 4.0, (10.0, 5.0), 1.0) == pytest.approx((0.8, 1.6))

    def test_time_line_of_a_step_up_and_down(self) -> None:
        sample = [i * 0.1 for i in range(600)]  # 10 a second
        steering = InferLine(InferLineSettings(first_plan_s=1e9, replan_s=1e9), {"p": sample})
        desired, total, changes = 1, 0.0, []
        for tick in range(400):
            at_s = tick * 0.25
            rate = 30.0 if 20.0 <= at_s < 40.0 else 10.0
            total += rate * 0.25
            for action in steering.steer(snapshot(at_s, stage(arrivals=total, desired=desired), slo_s=1.0)):
                desired = action.replicas
                changes.append((at_s, desired))
        # Planned for 10 a second: one replica of 10 a second is busy all the time and just meets it.
        assert changes[0] == (20.0, 2)  # the half-second window at 20 a second
        assert changes[1] == (20.25, 3)
        # 5 s windows with some of the burst are recent until 70 s; the window of 60 s then still holds 30 s
        # at 10 and 20 s at 30 a second, more than planned until the burst has left it at 100 s.
        assert changes[2][0] == pytest.approx(67.5, abs=2.5)
        assert changes[3][0] == pytest.approx(99.5, abs=1.0)
        assert [n for _, n in changes] == [2, 3, 2, 1]

    def test_plans_on_what_came_when_nobody_gives_a_sample(self) -> None:
        steering = InferLine(InferLineSettings(first_plan_s=5.0))
        desired, total, at_plan = 1, 0.0, {}
        for tick in range(40):
            total += 25 * 0.25
            for action in steering.steer(snapshot(tick * 0.25, stage(arrivals=total, desired=desired))):
                desired = action.replicas
                at_plan[tick * 0.25] = desired
        # Until the plan 25 / (10 x 0.7) = 3.6, from 5 s on the three that keep up and meet 2 s.
        assert at_plan[1.0] == 4
        assert desired == 3

    def test_a_plan_that_cannot_be_made_is_tried_again_soon(self) -> None:
        steering = InferLine(InferLineSettings(first_plan_s=5.0, replan_s=300.0, utilisation_ratio=0.1))
        desired, total, changes = 1, 0.0, {}
        for tick in range(64):  # nobody comes for ten seconds: no plan at 5 s, nor at 10
            at_s = tick * 0.25
            total += 25 * 0.25 if at_s > 10.0 else 0.0
            for action in steering.steer(snapshot(at_s, stage(arrivals=total, desired=desired))):
                desired = changes[at_s] = action.replicas
        # Without a plan the mean so far (125 in 15 s) at a tenth of 10 a second; then three by the plan.
        assert [changes[14.75], changes[15.0]] == [9, 3]

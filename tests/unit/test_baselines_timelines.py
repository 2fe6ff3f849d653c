"""Time lines of the rivals, computed by hand."""

from __future__ import annotations

import math

import pytest

from keystage.baselines.bounds import actions, bounded, fit
from keystage.baselines.cocktail import Cocktail, CocktailSettings, is_late
from keystage.baselines.dispatch import instances, rate_bounds
from keystage.baselines.envelope import ArrivalLog, widths
from keystage.baselines.forecast import forecast
from keystage.baselines.inferline import (
    InferLine,
    InferLineSettings,
    Plan,
    scale_down,
    scale_up,
)
from keystage.baselines.infless import Infless, InflessSettings
from keystage.baselines.keepalive import KeepAliveSettings, LongShortHistogram, percentile
from keystage.baselines.planner import pass_stage, plan
from keystage.baselines.seen import Seen, Watch, batch_within, deadline_s
from keystage.baselines.static import Static, StaticSettings, allocate
from keystage.baselines.tunable import Range
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Counters,
    FunctionView,
    GpuView,
    NodeView,
    Override,
    PipelineView,
    RouterSample,
    Slo,
    Snapshot,
    StageView,
    Starting,
)

ONE_S = BatchProfile(alpha_s=1.0, beta_s=0.0, most=1)
TENTH = BatchProfile(alpha_s=0.1, beta_s=0.0, most=1)


def stage(
    index: int = 0,
    arrivals: float | None = 0.0,
    *,
    queue: float = 0.0,
    services: float = 0.0,
    sojourn_s: float = 0.0,
    desired: int = 1,
    batch: BatchProfile | None = TENTH,
    incarnation: str = "a",
    **scale: object,
) -> StageView:
    function = FunctionView(
        function=f"p-stage-{index}",
        desired=desired,
        ready=desired,
        **scale,  # type: ignore[arg-type]
    )
    counters = Counters(
        arrivals=arrivals,
        services=services,
        service_sum_s=services * 0.1,
        sojourn_sum_s=sojourn_s,
        queue=queue,
    )
    sample = RouterSample(incarnation=incarnation, at_s=arrivals, counters=counters)
    return StageView(stage=index, scale=function, routers=(sample,), batch=batch, start_s=2.0)


def snapshot(at_s: float, *stages: StageView, slo_s: float = 2.0, **more: object) -> Snapshot:
    view = PipelineView(pipeline="p", execution="single-pass", slo=Slo(deadline_s=slo_s), stages=stages)
    return Snapshot(at_s=at_s, pipelines=(view,), **more)  # type: ignore[arg-type]


def seen(scale: FunctionView | None = None, **changes: object) -> Seen:
    fields: dict[str, object] = {
        "function": "p-stage-0", "scale": scale or FunctionView(function="p-stage-0", desired=1, ready=1),
        "arrivals": 0.0, "services": 0.0, "sojourn_s": 0.0, "queue": 0.0, "batch": TENTH, "gpus": 1,
        "gpu_bytes": 0, "start_s": 2.0,
    }  # fmt: skip
    return Seen(**{**fields, **changes})  # type: ignore[arg-type]


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


class TestInfless:
    def test_bounds_of_an_instance(self) -> None:
        # l(4) = 0.6 > 0.5, l(3) = 0.5 fits into half of 1 s
        bounds = rate_bounds(BatchProfile(alpha_s=0.1, beta_s=0.2, most=4), 1.0)
        assert bounds.batch == 3
        assert [bounds.high_rps, bounds.low_rps] == pytest.approx([6.0, 6.0])
        single = rate_bounds(TENTH, 1.0)
        assert single.batch == 1
        assert [single.high_rps, single.low_rps] == pytest.approx([10.0, 0.0])
        hopeless = rate_bounds(ONE_S, 0.5)
        assert (hopeless.batch, hopeless.high_rps) == (1, 1.0)

    def test_three_cases_of_dispatching(self) -> None:
        bounds = rate_bounds(TENTH, 1.0)  # 0 .. 10 a second: the line is 0.2 x 10 an instance
        assert instances(45.0, 2, bounds, 0.8) == 5  # above n r_up: scale out
        assert instances(15.0, 5, bounds, 0.8) == 5  # 15 > 5 x 2: nothing is released
        assert instances(7.0, 5, bounds, 0.8) == 3  # released until 7 >= 3 x 2
        assert instances(0.0, 5, bounds, 0.8) == 1
        assert instances(12.0, 9, bounds, 0.0) == 2  # alpha 0: whatever is not needed goes

    def test_percentiles(self) -> None:
        values = [float(v) for v in range(1, 101)]
        assert (percentile(values, 0.05), percentile(values, 0.99), percentile([7.0], 0.5)) == (
            5.0,
            99.0,
            7.0,
        )

    def test_idle_levels_stay_for_the_default_until_enough_is_known(self) -> None:
        histogram = LongShortHistogram(KeepAliveSettings(keep_s=10.0))
        assert histogram.warm(3, 3, 0.0, 2.0) == 3
        assert histogram.warm(1, 3, 5.0, 2.0) == 3
        assert histogram.warm(1, 3, 15.0, 2.0) == 3
        assert histogram.warm(1, 3, 15.1, 2.0) == 1

    def test_windows_are_the_weighted_percentiles_of_both_histories(self) -> None:
        settings = KeepAliveSettings(keep_s=100.0, least=2, short_s=30.0, gamma_ratio=0.25)
        histogram = LongShortHistogram(settings)
        at_s = 0.0
        for gap_s in (40.0, 40.0, 20.0, 20.0):  # level 2 comes back after these idle times
            histogram.warm(1, 2, at_s, 1.0)
            at_s += gap_s
            histogram.warm(2, 2, at_s, 1.0)
        # long: 20 .. 40; short (ends within the last 30 s): 20 .. 20; tail 0.25 x 40 + 0.75 x 20 = 25
        head_s, tail_s = histogram.windows(at_s, 1.0)
        assert tail_s == pytest.approx(25.0 * 1.1)
        assert head_s == pytest.approx(20.0 * 0.9 - 1.0)  # ready in time for the 5th percentile
        assert histogram.windows(at_s, 10.0)[0] == 0.0  # 20 x 0.9 - 10 < 10: unloading does not pay
        # Idle again: unloaded, loaded before the head, gone after the tail.
        assert [histogram.warm(1, 2 if dt == 0 else 1, at_s + dt, 1.0) for dt in (0.0, 16.0, 18.0, 28.0)] == [
            1, 1, 2, 1,
        ]  # fmt: skip

    def test_time_line(self) -> None:
        steering = Infless(InflessSettings(window_s=1.0, keep=KeepAliveSettings(keep_s=4.0)))
        desired, total, seen_ = 1, 0.0, []
        for tick in range(60):
            at_s = tick * 0.25
            total += (35.0 if at_s < 5.0 else 5.0) * 0.25
            for action in steering.steer(snapshot(at_s, stage(arrivals=total, desired=desired), slo_s=1.0)):
                desired = action.replicas
                seen_.append((at_s, desired))
        # The window of 1 s fills with 35 a second: 1, 2, 3, 4 instances of 10. At 5 a second 5 / 2 = 2 stay
        # above the line once the window holds no more of the burst; the others are kept 4 s longer.
        assert [n for _, n in seen_] == [2, 3, 4, 2]
        assert seen_[-1][0] == pytest.approx(5.75 + 4.25, abs=0.5)

    def test_what_waits_counts(self) -> None:
        steering = Infless(InflessSettings(drain_s=2.0))
        steering.steer(snapshot(0.0, stage()))
        got = steering.steer(snapshot(0.25, stage(queue=50.0), slo_s=1.0))
        assert got == [SetReplicas(function="p-stage-0", replicas=3)]  # 25 a second of 10 each


class TestCocktail:
    def test_forecast_of_a_constant_is_the_constant(self) -> None:
        ahead = forecast([5.0] * 40, 3, 4)
        assert ahead is not None
        assert ahead.mean_rps == pytest.approx((5.0, 5.0, 5.0))
        assert ahead.peak_rps(2.0) == pytest.approx(5.0)

    def test_forecast_learns_an_alternation(self) -> None:
        ahead = forecast([2.0, 8.0] * 40, 2, 2)
        assert ahead is not None
        assert ahead.mean_rps[0] < 4.0
        assert ahead.mean_rps[1] > 6.0

    def test_forecast_with_little_history(self) -> None:
        assert forecast([], 2, 4) is None
        ahead = forecast([1.0, 3.0], 2, 4)
        assert ahead is not None
        assert ahead.mean_rps == (2.0, 2.0)
        assert ahead.peak_rps(1.0) == pytest.approx(3.0)

    def test_weighted_split_by_service_time(self) -> None:
        steering = Cocktail(CocktailSettings(safety_ratio=1.0, react_s=1e9))
        slow = BatchProfile(alpha_s=0.3, beta_s=0.0, most=1)
        desired, total = [1, 1], 0.0
        for tick in range(25):
            total += 20 * 0.25
            stages = (stage(0, total, desired=desired[0]), stage(1, total, desired=desired[1], batch=slow))
            for action in steering.steer(snapshot(tick * 0.25, *stages)):
                desired[int(action.function[-1])] = action.replicas
        assert desired == [2, 6]  # 20 a second x 0.1 s and 0.3 s

    def test_given_back_only_when_six_plans_did_without(self) -> None:
        settings = CocktailSettings(safety_ratio=1.0, react_s=1e9, history=1, interval_s=5.0)
        steering = Cocktail(settings)
        desired, total, changes = 1, 0.0, []
        for tick in range(300):
            at_s = tick * 0.25
            total += (40.0 if at_s < 10.0 else 10.0) * 0.25
            for action in steering.steer(snapshot(at_s, stage(arrivals=total, desired=desired))):
                desired = action.replicas
                changes.append((at_s, desired))
        assert changes[0] == (5.0, 4)
        # The last window of the burst ends at 10 s; five plans later (35 s) it is still among six.
        assert changes[-1] == (40.0, 1)

    def test_violations(self) -> None:
        assert is_late(seen(), 10.0, 11.0, 100.0, 1.0)
        assert not is_late(seen(), 10.0, 9.0, 100.0, 1.0)
        assert is_late(seen(queue=11.0), 0.0, 0.0, 10.0, 1.0)
        assert not is_late(seen(queue=9.0), 0.0, 0.0, 10.0, 1.0)

    def test_a_violation_adds_a_tenth_unless_replicas_are_on_their_way(self) -> None:
        steering = Cocktail(CocktailSettings(react_s=1.0, sample_s=1e6))
        steering.steer(snapshot(0.0, stage(desired=10)))
        late = stage(desired=10, services=10.0, sojourn_s=50.0)
        assert steering.steer(snapshot(1.0, late)) == []  # the first look has nothing to compare with
        late = stage(desired=10, services=20.0, sojourn_s=100.0)
        assert steering.steer(snapshot(2.0, late)) == [SetReplicas(function="p-stage-0", replicas=11)]
        late = stage(desired=11, services=30.0, sojourn_s=150.0, starting=(Starting("r", 9.0),))
        assert steering.steer(snapshot(3.0, late)) == []


class TestStatic:
    def test_the_slow_stage_gets_what_saves_most(self) -> None:
        assert allocate(5.0, [0.1, 0.2, 0.1], 1.0, 1.0, 4) == [1, 2, 1]
        assert allocate(5.0, [0.1, 0.1], 1.0, 1.0, 6) == [3, 3]

    def test_too_few_for_stability_are_dealt_by_utilisation(self) -> None:
        assert allocate(40.0, [0.1, 0.3], 1.0, 1.0, 6) == [2, 4]

    def test_acts_once_and_leaves_unknown_pipelines_alone(self) -> None:
        steering = Static(StaticSettings(rates_rps={"p": 15.0}, replicas=5))
        got = steering.steer(snapshot(0.0, stage(0), stage(1)))
        assert sorted(a.replicas for a in got) == [2, 3]
        after = [stage(int(a.function[-1]), desired=a.replicas) for a in got]
        assert steering.steer(snapshot(1.0, *sorted(after, key=lambda s: s.stage))) == []
        assert Static(StaticSettings()).steer(snapshot(0.0, stage())) == []


def test_ranges_must_be_ranges() -> None:
    with pytest.raises(ValueError, match="low <= high"):
        Range(2.0, 1.0)
    with pytest.raises(ValueError, match="low > 0"):
        Range(0.0, 1.0, is_log=True)

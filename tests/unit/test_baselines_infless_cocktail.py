"""Time lines of INFless, Cocktail and the static reference, computed by hand."""

from __future__ import annotations

import pytest
from support.baseline_views import ONE_S, TENTH, seen, snapshot, stage

from keystage.baselines.cocktail import Cocktail, CocktailSettings, is_late
from keystage.baselines.dispatch import RateBounds, instances, rate_bounds
from keystage.baselines.forecast import forecast
from keystage.baselines.infless import Infless, InflessSettings
from keystage.baselines.keepalive import KeepAliveSettings, LongShortHistogram, percentile
from keystage.baselines.static import Static, StaticSettings, allocate
from keystage.baselines.tunable import Range
from keystage.controller.domain.decision import SetReplicas
from keystage.controller.domain.snapshot import (
    BatchProfile,
    Starting,
)


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
        single = RateBounds(low_rps=0.0, high_rps=10.0, batch=1)
        assert instances(0.1, 5, single, 1.0) == 5  # alpha 1: any rate is above a line at 0
        assert instances(0.0, 5, single, 1.0) == 1

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
        assert histogram.windows(at_s, 10.0)[0] == pytest.approx(8.0)  # 20 x 0.9 - 10: a start fits in
        assert histogram.windows(at_s, 18.5)[0] == 0.0  # longer than the head: unloading does not pay
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

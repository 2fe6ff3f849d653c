"""The estimator on time lines: rates, variation, restarts, gaps, stale and garbled samples."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import pytest

from keystage.controller.domain.snapshot import Counters, RouterSample, WorkerSample
from keystage.controller.domain.state import EstimatorState
from keystage.controller.maths.estimator import Estimates, EstimatorSettings, estimate

SETTINGS = EstimatorSettings()
ZERO = Counters(
    arrivals=0,
    gap_sum_s=0,
    gap_sq_sum_s2=0,
    services=0,
    service_sum_s=0,
    service_sq_sum_s2=0,
    sojourn_sum_s=0,
)


def counters(arrivals: list[float], service_s: float, sojourn_s: float = 0.02) -> Counters:
    """Counters after these arrival times, each served in `service_s`."""
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals])]
    n = len(arrivals)
    return Counters(
        arrivals=n,
        gap_sum_s=sum(gaps),
        gap_sq_sum_s2=sum(g * g for g in gaps),
        services=n,
        service_sum_s=n * service_s,
        service_sq_sum_s2=n * service_s**2,
        sojourn_sum_s=n * sojourn_s,
        queue=3,
        in_flight=1,
    )


def sample(at_s: float, c: Counters, incarnation: str = "a") -> RouterSample:
    return RouterSample(incarnation=incarnation, at_s=at_s, counters=c)


def play(arrivals: list[float], until_s: float, tick_s: float = 0.25) -> tuple[Estimates, EstimatorState]:
    """Feeds one sample per tick of a run that began empty at 0."""
    known, state = estimate(SETTINGS, EstimatorState(), 100.0, [sample(0.0, ZERO)], [])
    for k in range(1, round(until_s / tick_s) + 1):
        now = k * tick_s
        seen = counters([a for a in arrivals if a <= now], 0.01)
        known, state = estimate(SETTINGS, state, 100.0 + now, [sample(now, seen)], [])
    return known, state


def steady(rate_rps: float, until_s: float) -> list[float]:
    return [k / rate_rps for k in range(1, round(rate_rps * until_s) + 1)]


def gamma(rate_rps: float, cv: float, until_s: float, seed: int) -> list[float]:
    draw = random.Random(seed)

    def times() -> Iterator[float]:
        now = 0.0
        while now < until_s:
            now += draw.gammavariate(1 / cv**2, cv**2 / rate_rps)
            yield now

    return list(times())


def test_first_sample_knows_no_rate() -> None:
    known, state = estimate(SETTINGS, EstimatorState(), 5.0, [sample(1.0, ZERO)], [])
    assert known.arrival_rps is None
    assert not known.invalid
    assert state.at_s == 5.0


def test_steady_arrivals() -> None:
    known, _ = play(steady(80.0, 10), 10)
    assert known.arrival_rps == pytest.approx(80, rel=0.01)
    assert known.arrival_slow_rps == pytest.approx(80, rel=0.01)
    assert known.arrival_scv == pytest.approx(0, abs=1e-6)
    assert known.service_s == pytest.approx(0.01)
    assert known.service_scv == pytest.approx(0, abs=1e-6)
    assert known.capacity_rps == pytest.approx(100)
    assert known.sojourn_s == pytest.approx(0.02)
    assert (known.queue, known.in_flight) == (3, 1)


def test_the_short_window_follows_a_burst_and_the_long_one_does_not() -> None:
    bursts = [10 * k + i / 400 for k in range(8) for i in range(1, 201)]  # half a second in ten: CV 14
    known, _ = play(bursts, 70.5)
    assert known.arrival_rps is not None
    assert known.arrival_slow_rps is not None
    assert known.arrival_rps > 60
    assert known.arrival_slow_rps < 40


@pytest.mark.parametrize(("before_rps", "after_rps", "within_s"), [(20, 80, 0.75), (80, 8, 4.0)])
def test_a_step_of_regular_traffic_is_believed_at_once(
    before_rps: float, after_rps: float, within_s: float
) -> None:
    after = [30 + k / after_rps for k in range(1, round(after_rps * 5) + 1)]
    known, _ = play([*steady(before_rps, 30), *after], 30 + within_s)
    assert known.arrival_slow_rps == pytest.approx(after_rps, rel=0.9 if after_rps < before_rps else 0.1)
    assert known.arrival_scv < 2  # a step is hardly a variation


def test_chance_is_no_step() -> None:
    for seed in range(4):
        slow = play(gamma(50, 1, 40, seed), 40)[0].arrival_slow_rps
        assert slow == pytest.approx(50, rel=0.15)


@pytest.mark.parametrize("tick_s", [0.05, 0.25, 2.0])
def test_nothing_depends_on_the_tick(tick_s: float) -> None:
    known, _ = play(gamma(50, 2, 40, 1), 40, tick_s)
    reference, _ = play(gamma(50, 2, 40, 1), 40, 0.5)
    assert known.arrival_slow_rps == pytest.approx(reference.arrival_slow_rps, rel=0.1)
    assert known.arrival_scv == pytest.approx(reference.arrival_scv, rel=0.1)


def test_bursty_arrivals_are_recognised_over_seeds() -> None:
    scvs = [play(gamma(200, 4, 30, seed), 30, 0.5)[0].arrival_scv for seed in range(8)]
    assert 10 < sum(scvs) / len(scvs) < 20  # CV 4: 16


def test_the_prior_holds_until_there_are_arrivals_enough() -> None:
    known, _ = play(gamma(20, 4, 5, 3), 5)  # about 100 arrivals where 20 CV^2 = 320 are needed
    assert known.arrival_scv == SETTINGS.prior_arrival_scv


def test_a_restarted_router_begins_anew() -> None:
    known, state = play(steady(80.0, 10), 10)
    small = counters(steady(80.0, 0.25), 0.01)
    for k in range(40):
        small = counters(steady(80.0, 0.25 * (k + 1)), 0.01)
        known, state = estimate(SETTINGS, state, 110.25 + k / 4, [sample(0.25 * (k + 1), small, "b")], [])
        assert not known.invalid
    assert known.arrival_rps == pytest.approx(80, rel=0.05)


def test_a_shrinking_counter_is_not_believed_and_the_memory_stays() -> None:
    before, state = play(steady(80.0, 10), 10)
    fallen = [sample(10.25, counters(steady(80.0, 1), 0.01))]
    known, after = estimate(SETTINGS, state, 110.25, fallen, [])
    assert known.invalid == "counters of router a went back"
    assert after == state
    seen = [sample(10.5, counters(steady(80.0, 10.5), 0.01))]  # what came back is no burst
    known, _ = estimate(SETTINGS, after, 110.5, seen, [])
    assert known.arrival_rps == pytest.approx(before.arrival_rps, rel=0.05)


def test_a_counter_that_stays_small_is_believed_in_time_and_gives_no_negative_rate() -> None:
    _, state = play(steady(80.0, 10), 10)
    for k in range(40):
        at_s = 0.25 * (k + 1)
        known, state = estimate(
            SETTINGS, state, 110 + at_s, [sample(10 + at_s, counters(steady(80.0, at_s), 0.01))], []
        )
        assert bool(known.invalid) == (at_s <= SETTINGS.stale_s)
        assert known.invalid or known.arrival_rps == pytest.approx(80, rel=0.05)


def test_one_of_two_routers_that_stands_still_is_named() -> None:
    state = EstimatorState()
    stood = sample(5.0, counters(steady(80.0, 5), 0.01), "b")
    for k in range(20):
        at_s = 5 + k / 4
        alive = sample(at_s, counters(steady(80.0, at_s), 0.01))
        known, state = estimate(SETTINGS, state, 100 + at_s, [alive, stood], [])
        assert bool(known.invalid) == (at_s - 5 > SETTINGS.stale_s)
    assert known.invalid.startswith("statistics of router b stand still for 4.8 s")


def test_a_gap_in_observation_is_just_a_long_difference() -> None:
    _, state = play(steady(80.0, 10), 10)
    known, _ = estimate(SETTINGS, state, 140.0, [sample(40.0, counters(steady(80.0, 40), 0.01))], [])
    assert known.arrival_rps == pytest.approx(80, rel=0.01)


def test_a_standing_clock_is_tolerated_shortly_and_then_invalid() -> None:
    before, state = play(steady(80.0, 10), 10)
    again = [sample(10.0, counters(steady(80.0, 10), 0.01))]
    known, state = estimate(SETTINGS, state, 111.0, again, [])
    assert known.arrival_rps == before.arrival_rps
    known, _ = estimate(SETTINGS, state, 114.0, again, [])
    assert "stand still for 4.0 s" in known.invalid


def test_time_that_steps_back_does_not_harm() -> None:
    _, state = play(steady(80.0, 10), 10)
    for k in range(8):
        seen = counters(steady(80.0, 10.25 + k / 4), 0.01)
        known, state = estimate(SETTINGS, state, 50 + k / 4, [sample(10.25 + k / 4, seen)], [])
    assert known.arrival_rps == pytest.approx(80, rel=0.05)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["arrivals", "gap_sum_s", "service_sum_s", "sojourn_sum_s"])
def test_garbled_counters_are_invalid_and_leave_the_memory(bad: float | None, field: str) -> None:
    _, state = play(steady(80.0, 2), 2)
    broken = msgspec.structs.replace(counters([1.0], 0.01), **{field: bad})
    known, after = estimate(SETTINGS, state, 103.0, [sample(3.0, broken)], [])
    assert known.invalid
    assert after == state
    assert estimate(SETTINGS, state, 103.0, [sample(math.nan, ZERO)], [])[0].invalid
    assert estimate(SETTINGS, state, 103.0, [], [])[0].invalid


def worker(replica: str, busy_s: float, rows: float) -> WorkerSample:
    return WorkerSample(replica=replica, slots=8, held_slots=4, busy_s=busy_s, rows=rows)


def test_capacity_comes_from_busy_time_so_that_batches_count() -> None:
    _, state = estimate(SETTINGS, EstimatorState(), 0.0, [sample(0.0, ZERO)], [worker("w", 0, 0)])
    seen = counters(steady(80.0, 10), 0.04)  # batches of eight take 40 ms
    known, _ = estimate(SETTINGS, state, 10.0, [sample(10.0, seen)], [worker("w", 4.0, 800)])
    assert known.service_s == pytest.approx(0.04)
    assert known.capacity_rps == pytest.approx(200)
    assert known.busy_ratio == pytest.approx(0.4)
    assert known.slots == 8
    assert known.slot_ratio == 0.5


def test_cold_services_of_a_new_worker_are_left_out() -> None:
    _, state = estimate(SETTINGS, EstimatorState(), 0.0, [sample(0.0, ZERO)], [worker("w", 0, 0)])
    warm = counters(steady(80.0, 10), 0.01)
    _, state = estimate(SETTINGS, state, 10.0, [sample(10.0, warm)], [worker("w", 8.0, 800)])
    cold = msgspec.structs.replace(warm, services=810, service_sum_s=8 + 10 * 2.0)
    workers = [worker("w", 8.0, 800), worker("v", 20.0, 10)]
    known, _ = estimate(SETTINGS, state, 10.25, [sample(10.25, cold)], workers)
    assert known.service_s == pytest.approx(0.01)


def test_totals_of_a_running_router_give_a_new_leader_the_service_time() -> None:
    known, _ = estimate(SETTINGS, EstimatorState(), 0.0, [sample(50.0, counters(steady(80, 5), 0.01))], [])
    assert known.service_s == pytest.approx(0.01)
    assert known.arrival_rps is None


def test_profile_stands_in_until_services_are_seen() -> None:
    assert estimate(SETTINGS, EstimatorState(), 0.0, [sample(0.0, ZERO)], [], 0.03)[0].service_s == 0.03
    assert estimate(SETTINGS, EstimatorState(), 0.0, [sample(0.0, ZERO)], [], math.nan)[0].service_s is None


def test_several_routers_add_up() -> None:
    routers = [sample(0.0, ZERO, "a"), sample(3.0, ZERO, "b")]
    _, state = estimate(SETTINGS, EstimatorState(), 0.0, routers, [])
    seen = counters(steady(40.0, 5), 0.01)
    known, _ = estimate(SETTINGS, state, 5.0, [sample(5.0, seen, "a"), sample(8.0, seen, "b")], [])
    assert known.arrival_rps == pytest.approx(80, rel=0.01)
    assert known.queue == 6

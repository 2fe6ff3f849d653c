"""Deferred batching near the peak: rates, parts of the replicas, targets, staggered starts, lookahead."""

import math

import numpy as np
import pytest

from keystage.batching.api import Delays, Request
from keystage.batching.arrival_rate import ENOUGH, FIRST, LONGEST_SLOS, ArrivalRate
from keystage.batching.deferred import Deferred, target_batch
from keystage.batching.lookahead import heads_to_give_up
from keystage.batching.model_side import ModelSide
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue
from keystage.batching.surroundings import Pool, Surroundings

RESNET = LatencyProfile(alpha_s=1.053e-3, beta_s=5.072e-3)
BERT = LatencyProfile(alpha_s=7.008e-3, beta_s=0.159e-3)
SLO_S = 0.025


def around(
    replicas: int, rate_rps: float, profile: LatencyProfile = RESNET, staggered: int = 16
) -> Surroundings:
    pool, made = Pool(), Surroundings(profile)
    pool.resize(replicas)
    made.join(pool)
    made.rate_rps, made.staggered = rate_rps, staggered
    made.set_load(rate_rps * profile.latency_s(staggered) / staggered, 1.0)
    return made


def waiting(made: Surroundings | None, count: int, oldest_s: float, gap_s: float) -> RequestQueue:
    """So many requests at time 0, the first `oldest_s` old."""
    queue = RequestQueue(made)
    for number in range(count):
        came_s = -oldest_s + number * gap_s
        queue.push(Request(number, 0, came_s, came_s + SLO_S))
    return queue


def told(rate: ArrivalRate, gaps_s: list[float], begin_s: float = 0.0) -> tuple[int, float]:
    """Windows that ended, and the time after all gaps."""
    now_s, ended = begin_s, 0
    for gap_s in gaps_s:
        now_s += gap_s
        ended += rate.count(now_s, SLO_S)
    return ended, now_s


def test_a_rate_is_known_after_the_first_window_and_follows() -> None:
    rate = ArrivalRate()
    assert told(rate, [0.001] * FIRST)[0] == 0
    assert rate.rate_rps == 0.0
    _, now_s = told(rate, [0.001] * 10 * ENOUGH, begin_s=0.001 * FIRST)
    assert rate.rate_rps == pytest.approx(1000)
    assert rate.scv == pytest.approx(0.0, abs=1e-6)
    told(rate, [0.0005] * 3 * ENOUGH, begin_s=now_s)
    assert rate.rate_rps == pytest.approx(2000)


def test_windows_last_long_enough_for_bursts_to_be_seen() -> None:
    rate = ArrivalRate()
    told(rate, [1e-5] * 20 * ENOUGH)
    before = rate.rate_rps
    # 1e-5 s apart a window of ENOUGH would take 16 ms: less than an objective.
    assert before == pytest.approx(1e5)
    ended, _ = told(rate, [1e-5] * ENOUGH, begin_s=20 * ENOUGH * 1e-5)
    assert ended == 0


def test_a_rate_that_falls_is_noticed_without_arrivals() -> None:
    rate = ArrivalRate()
    assert not rate.look(5.0, SLO_S)
    _, now_s = told(rate, [0.001] * 5 * ENOUGH)
    later_s = now_s + LONGEST_SLOS * SLO_S
    assert not rate.look(now_s + SLO_S, SLO_S)
    assert rate.look(later_s + 1e-3, SLO_S)
    assert rate.rate_rps < 300
    assert rate.look(later_s + 1e-3 + 1.01 * LONGEST_SLOS * SLO_S, SLO_S)
    assert rate.rate_rps < 70


def test_gamma_arrivals_show_their_burstiness() -> None:
    random = np.random.default_rng(1)
    for shape in (1.0, 0.2):
        rate = ArrivalRate()
        told(rate, (random.standard_gamma(shape, 20 * ENOUGH) / shape / 1000).tolist())
        assert rate.scv == pytest.approx(1 / shape, rel=0.3)
        assert rate.rate_rps == pytest.approx(1000, rel=0.15)
    simultaneous = ArrivalRate()
    told(simultaneous, [0.0] * 200)
    assert simultaneous.rate_rps == 0.0


def test_parts_of_the_replicas_go_by_load() -> None:
    pool, other, a, b = Pool(), Pool(), Surroundings(RESNET), Surroundings(RESNET)
    assert a.parts().utilisation == 0.0
    pool.resize(8)
    other.resize(2)
    a.join(pool)
    b.join(pool)
    assert (a.parts().share, a.parts().utilisation) == (0.0, 0.0)
    a.set_load(3.0, 1.0)
    b.set_load(1.0, 5.0)
    assert (pool.typical_share, pool.scv) == (8 * 10 / 16, 2.0)
    assert (a.parts().share, b.parts().share) == (6.0, 2.0)
    assert a.parts().utilisation == 0.5
    assert a.ends_if_alone(64) is None
    b.join(other)
    assert (pool.load, other.load) == (3.5, 0.5)
    assert b.parts().share == pytest.approx(8 * 0.5 / 3.5 + 2)
    assert b.replicas == 10
    b.leave(pool)
    assert (pool.load, other.load) == (3.0, 1.0)
    assert list(a.ends_if_alone(8) or [0.0]) == [0.0]
    assert a.ends_if_alone(7) is None


def test_plentiful_is_more_than_two_idle_or_one_in_a_small_pool() -> None:
    pool = Pool()
    pool.resize(8)
    pool.ends_s = dict.fromkeys(range(6), 1.0)
    assert (pool.idle, pool.is_plentiful) == (2, False)
    del pool.ends_s[0]
    assert (pool.idle, pool.is_plentiful) == (3, True)
    pool.replicas, pool.ends_s = 3, {0: 1.0}
    assert pool.is_plentiful


def test_the_target_keeps_up_with_the_arrivals() -> None:
    # Eight replicas with batches of 13 serve 5,545 requests/s.
    assert target_batch(around(8, 5545)) == 13
    assert target_batch(around(8, 1000)) == 1
    assert target_batch(around(8, 5839)) == 16
    assert target_batch(around(8, 20000)) == 16


def test_without_surroundings_it_is_algorithm_1() -> None:
    found = Deferred().candidate(waiting(None, 4, 0.002, 0.0005), RESNET, 0.0, 0.0)
    assert found is not None
    assert found.size == 4
    assert found.start_s == pytest.approx(SLO_S - 0.002 - RESNET.latency_s(5))
    assert found.relaxed_s == -math.inf


def test_staggered_starts_wait_for_the_others_to_come_closer() -> None:
    made = around(8, 5000)
    queue = waiting(made, 10, 0.002, 0.0002)
    frontrun_s = SLO_S - 0.002 - RESNET.latency_s(11)
    takes_s = RESNET.latency_s(10)
    made.batches, made.ends_s = 7, 7 / 2 * takes_s + 7 * 0.001
    found = Deferred().candidate(queue, RESNET, 0.0, 0.0)
    assert found is not None
    assert found.start_s == pytest.approx(0.001)
    assert found.relaxed_s == pytest.approx(frontrun_s, abs=2e-4)
    made.ends_s = 7 / 2 * takes_s - 0.001
    found = Deferred().candidate(queue, RESNET, 0.0, 0.0)
    assert found is not None
    assert found.start_s == 0.0
    made.ends_s = 7 * 0.1
    found = Deferred().candidate(queue, RESNET, 0.0, 0.0)
    assert found is not None
    assert found.start_s == pytest.approx(frontrun_s, abs=2e-4)


def test_with_one_replica_for_itself_a_model_is_eager_unless_replicas_are_plentiful() -> None:
    made = around(1, 500)
    made.batches, made.ends_s = 1, 0.010
    found = Deferred().candidate(waiting(made, 3, 0.002, 0.0002), RESNET, 0.0, 0.0)
    assert found is not None
    assert found.start_s == 0.0
    assert found.relaxed_s > 0.001
    made.set_load(1.0, 10.0)
    found = Deferred().candidate(waiting(made, 3, 0.002, 0.0002), RESNET, 0.0, 0.0)
    assert found is not None
    assert (found.start_s, found.relaxed_s) == (0.0, -math.inf)


def test_bursty_arrivals_need_two_replicas_to_alternate() -> None:
    for scv, is_deferred in ((1.0, True), (10.0, False)):
        made = around(3, 900)
        other = Surroundings(RESNET)
        made.batches, made.ends_s = 1, 0.1
        made.set_load(1.0, scv)
        other.join(made._pools[0])
        other.set_load(1.0, scv)
        assert made.parts().share == made.parts().typical_share == 1.5
        found = Deferred().candidate(waiting(made, 3, 0.002, 0.0002), RESNET, 0.0, 0.0)
        assert found is not None
        assert (found.start_s > 0) == is_deferred


def assert_one_starts_at_once(made: Surroundings) -> None:
    """Of a model that batches hardly help, while all other replicas have only just begun."""
    made.batches, made.ends_s = 7, 7 * 0.02
    queue = RequestQueue(made)
    queue.push(Request(0, 0, 0.0, 0.056))
    found = Deferred().candidate(queue, BERT, 0.0, 0.0)
    assert found is not None
    assert (found.start_s, found.relaxed_s) == (0.0, -math.inf)


def test_where_batches_hardly_help_it_is_eager() -> None:
    made = around(8, 500, BERT, 3)
    assert_one_starts_at_once(made)
    # A staggered batch waits for no more, whatever the profile.
    made = around(8, 5000)
    made.batches, made.ends_s = 7, 1.0
    found = Deferred().candidate(waiting(made, 16, 0.001, 0.00001), RESNET, 0.0, 0.0)
    assert found is not None
    assert found.start_s == 0.0


def test_above_capacity_little_to_gain_is_no_reason_to_start_unless_batches_help_nobody() -> None:
    # 12 of 16: waiting makes a request 10 % cheaper at most; the others have only just begun.
    for rate_rps, is_overloaded in ((5_000, False), (8_000, True)):
        made = around(8, rate_rps)
        made.batches, made.ends_s = 7, 7 * RESNET.latency_s(12)
        found = Deferred(worth_ratio=0.1).candidate(waiting(made, 12, 0.001, 0.0001), RESNET, 0.0, 0.0)
        assert found is not None
        assert found.size == 12
        assert (found.start_s > 0) == is_overloaded
    made = around(8, 2_000, BERT, 3)
    assert made.parts().utilisation > 1
    assert_one_starts_at_once(made)


def test_what_follows_from_loads_is_found_anew_when_they_change() -> None:
    made = around(8, 5_000)
    assert made.derived(Surroundings.parts).utilisation == made.parts().utilisation < 1
    made.set_load(9.0, 1.0)
    assert made.derived(Surroundings.parts).utilisation == 9 / 8
    made._pools[0].resize(1)
    assert made.derived(Surroundings.parts).utilisation == 1.0
    assert made.derived(lambda _: pytest.fail("nothing has changed")).utilisation == 1.0
    made.set_service(BERT)
    assert made.derived(lambda _: "anew") == "anew"


def test_a_batch_that_a_replica_takes_no_more_than_starts_at_once() -> None:
    profile = LatencyProfile(1.053e-3, 5.072e-3, most=4)
    found = Deferred().candidate(waiting(around(8, 5000), 9, 0.001, 0.0001), profile, 0.0, 0.0)
    assert found is not None
    assert (found.size, found.start_s) == (4, 0.0)


def test_heads_are_given_up_when_the_batch_is_sent_not_before() -> None:
    made = around(65, 5545 / 8 * 65)
    queue = waiting(made, 40, 0.014, 0.00035)
    found = Deferred().candidate(queue, RESNET, 0.0, 0.0)
    assert found is not None
    assert found.size == RESNET.largest_batch(SLO_S - 0.014) == 5
    assert queue.take_given_up() == []
    made.is_granted = True
    # On more replicas than the lookahead plans for, the target alone decides.
    found = Deferred().candidate(queue, RESNET, 0.0, 0.0)
    assert found is not None
    assert found.size == 13
    gone = queue.take_given_up()
    assert SLO_S + gone[-1].arrived_s < RESNET.latency_s(13) <= queue.at(0).deadline_s


def test_no_head_is_given_up_for_batches_that_hardly_help() -> None:
    """Three at once take 2 % less of a replica than one after the other; one head is nearly due."""
    made = around(65, 65 / (BERT.latency_s(3) / 3), BERT)
    made.is_granted = True
    queue = RequestQueue(made)
    for number, deadline_s in enumerate((0.008, 0.04, 0.04, 0.04)):
        queue.push(Request(number, 0, 0.0, deadline_s))
    assert target_batch(made) > 1
    found = Deferred().candidate(queue, BERT, 0.0, 0.0)
    assert found is not None
    assert found.size == 1
    assert queue.take_given_up() == []
    # Were it nothing that counts as too little, the head would go.
    Deferred(worth_ratio=0.0).candidate(queue, BERT, 0.0, 0.0)
    assert [gone.number for gone in queue.take_given_up()] == [0]


def test_lookahead_keeps_the_heads_of_a_lull_and_gives_them_up_in_a_rush() -> None:
    lull, rush = around(2, 300), around(2, 1100)
    lull._pools[0].ends_s = rush._pools[0].ends_s = {0: 0.001}
    # Late heads, nothing to come: both replicas can serve all of it.
    few = waiting(lull, 8, 0.0135, 0.0015)
    fits = RESNET.largest_batch(few.at(0).deadline_s)
    assert heads_to_give_up(few, RESNET, 0.0, fits, 7) == 0
    rush._pools[0].ends_s = {0: 0.016}
    many = waiting(rush, 24, 0.0135, 0.0005)
    fits = RESNET.largest_batch(many.at(0).deadline_s)
    heads = heads_to_give_up(many, RESNET, 0.0, fits, 7)
    assert heads is not None
    assert heads > 0


def test_lookahead_says_when_it_cannot_tell() -> None:
    assert heads_to_give_up(waiting(None, 5, 0.01, 0.001), RESNET, 0.0, 3, 4) is None
    assert heads_to_give_up(waiting(around(2, 0.0), 5, 0.01, 0.001), RESNET, 0.0, 3, 4) is None
    assert heads_to_give_up(waiting(around(65, 100.0), 5, 0.01, 0.001), RESNET, 0.0, 3, 4) is None


def test_delays_shorten_batches_but_load_no_replica() -> None:
    loads, staggered = [], []
    for delays in (Delays(), Delays(control_s=0.004)):
        side = ModelSide(RESNET, Deferred(), delays)
        pool = Pool()
        pool.resize(8)
        side.around.join(pool)
        for number in range(FIRST + 1):
            side.arrive(Request(number, 0, 0.001 * number, 0.001 * number + SLO_S), 0.001 * number)
        batch = side.around.staggered
        staggered.append(batch)
        loads.append(side.around.parts().utilisation * 8 / (1000 * RESNET.latency_s(batch) / batch))
    assert staggered == [16, 12]
    assert loads == pytest.approx([1.0, 1.0])

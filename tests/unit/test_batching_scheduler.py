"""The central scheduler: who gets which replica, delays, groups, drops, requests that come back."""

import math

import pytest

from keystage.batching.api import Delays, Dispatch, Drop, Request
from keystage.batching.model_side import ModelSide
from keystage.batching.policies import Deferred, Eager, PlainDeferred, Timeout
from keystage.batching.profile import LatencyProfile
from keystage.batching.scheduler import CentralScheduler

PROFILE = LatencyProfile(alpha_s=1.0, beta_s=5.0)


def batches(scheduler: CentralScheduler) -> list[tuple[int, int, list[int], float]]:
    """(model, replica, requests, start) of the dispatches since the last call."""
    return [
        (order.model, order.replica, [request.number for request in order.requests], order.start_s)
        for order in scheduler.take()
        if isinstance(order, Dispatch)
    ]


def test_smallest_number_that_is_free_not_the_earliest() -> None:
    # Symphony's Figure 18 takes the replica that is free the earliest: that would be 1, idle from the start,
    # and then 2 in turn, so that none stays idle for long. Algorithm 1 takes the smallest number.
    scheduler = CentralScheduler([(PROFILE, Eager())])
    for replica in (2, 0, 1):
        scheduler.add_replica(replica, [0], 0.0)
    for i in range(5):
        at_s = 10.0 * i
        scheduler.arrive(Request(i, 0, at_s, at_s + 12), at_s)
        assert batches(scheduler) == [(0, 0, [i], at_s)]
        scheduler.finished(0, at_s + 6)


def test_with_delays_too_a_busy_smaller_number_beats_an_idle_larger_one() -> None:
    # Replica 0 ends at 6.5; a batch sent at 6 arrives at 7: both are free in time, 1 is free earlier.
    scheduler = CentralScheduler([(PROFILE, Eager())], Delays(control_s=1.0))
    scheduler.add_replica(0, [0], 0.0)
    scheduler.add_replica(1, [0], 0.0)
    scheduler.arrive(Request(0, 0, -0.5, 20.0), -0.5)
    assert batches(scheduler) == [(0, 0, [0], 0.5)]
    scheduler.arrive(Request(1, 0, 6.0, 20.0), 6.0)
    assert batches(scheduler) == [(0, 0, [1], 7.0)]


def test_a_batch_is_sent_ahead_by_its_delay() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())], Delays(control_s=0.5, data_s=0.25))
    scheduler.add_replica(0, [0], 0.0)
    scheduler.arrive(Request(0, 0, 0.0, 20.0), 0.0)
    assert batches(scheduler) == [(0, 0, [0], 0.75)]
    for number in (1, 2):
        scheduler.arrive(Request(number, 0, 1.0, 20.0), 1.0)
    assert batches(scheduler) == []
    # The first ends at 6.75; two requests take 1 s to get there.
    assert scheduler.next_timer_s() == pytest.approx(5.75)
    scheduler.on_timer(5.75)
    assert batches(scheduler) == [(0, 0, [1, 2], 6.75)]
    # One ahead is enough: the third waits for an end.
    scheduler.arrive(Request(3, 0, 6.0, 40.0), 6.0)
    assert batches(scheduler) == []


def test_a_replica_whose_estimate_has_passed_is_not_free() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())], Delays(control_s=0.5))
    scheduler.add_replica(0, [0], 0.0)
    scheduler.arrive(Request(0, 0, 0.0, 30.0), 0.0)
    assert batches(scheduler) == [(0, 0, [0], 0.5)]
    scheduler.arrive(Request(1, 0, 7.0, 30.0), 7.0)
    scheduler.on_timer(9.0)
    assert batches(scheduler) == []
    scheduler.finished(0, 10.0)
    assert batches(scheduler) == [(0, 0, [1], 10.5)]


def test_deferred_leaves_later_for_a_slower_network() -> None:
    for control_s, sent_s in ((0.0, 5.0), (0.5, 4.5)):
        scheduler = CentralScheduler([(PROFILE, PlainDeferred())], Delays(control_s=control_s))
        scheduler.add_replica(0, [0], 0.0)
        scheduler.arrive(Request(0, 0, 0.0, 12.0), 0.0)
        assert scheduler.next_timer_s() == pytest.approx(sent_s)
        scheduler.on_timer(sent_s)
        assert batches(scheduler) == [(0, 0, [0], 5.0)]


def test_most_urgent_batch_first_and_an_expired_one_is_made_anew() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())] * 2)
    scheduler.add_replica(0, [0, 1], 0.0)
    scheduler.arrive(Request(0, 0, 0.0, 100.0), 0.0)
    scheduler.arrive(Request(1, 0, 1.0, 30.0), 1.0)
    for number in (2, 3, 4):
        scheduler.arrive(Request(number, 1, 1.0, 14.5), 1.0)
    assert batches(scheduler) == [(0, 0, [0], 0.0)]
    # At 7 three of model 1 would end at 15: two do in time, and they are the more urgent.
    scheduler.finished(0, 7.0)
    assert batches(scheduler) == [(1, 0, [2, 3], 7.0)]
    scheduler.on_timer(9.0)
    (order,) = scheduler.take()
    assert isinstance(order, Drop)
    assert [request.number for request in order.requests] == [4]
    scheduler.finished(0, 14.0)
    assert batches(scheduler) == [(0, 0, [1], 14.0)]


def test_a_model_may_belong_to_several_groups() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())] * 2)
    scheduler.add_replica(3, [0, 1], 0.0)
    scheduler.add_replica(5, [1], 0.0)
    scheduler.arrive(Request(0, 1, 0.0, 12.0), 0.0)
    scheduler.arrive(Request(1, 1, 0.0, 12.0), 0.0)
    assert batches(scheduler) == [(1, 3, [0], 0.0), (1, 5, [1], 0.0)]
    scheduler.arrive(Request(2, 0, 1.0, 40.0), 1.0)
    scheduler.arrive(Request(3, 1, 1.0, 40.0), 1.0)
    scheduler.finished(5, 6.0)
    assert batches(scheduler) == [(1, 5, [3], 6.0)]
    scheduler.finished(3, 6.0)
    assert batches(scheduler) == [(0, 3, [2], 6.0)]


def test_a_replica_that_comes_serves_what_waits() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())])
    scheduler.arrive(Request(0, 0, 0.0, 12.0), 0.0)
    assert batches(scheduler) == []
    scheduler.add_replica(7, [0], 2.0)
    assert batches(scheduler) == [(0, 7, [0], 2.0)]
    scheduler.remove_replica(7, 3.0)
    scheduler.finished(7, 8.0)
    scheduler.arrive(Request(1, 0, 8.0, 20.0), 8.0)
    assert batches(scheduler) == []


def test_hopeless_requests_are_dropped_in_time_and_may_come_back_demoted() -> None:
    scheduler = CentralScheduler([(PROFILE, PlainDeferred())])
    late, other = Request(0, 0, 0.0, 12.0), Request(1, 0, 8.0, 20.0)
    scheduler.arrive(late, 0.0)
    due_s = scheduler.next_timer_s()
    assert due_s <= 5.0
    scheduler.on_timer(due_s)
    assert scheduler.take() == []
    assert 6.0 < scheduler.next_timer_s() < 6.001
    scheduler.on_timer(scheduler.next_timer_s())
    assert scheduler.take() == [Drop(0, [late])]
    assert scheduler.queued(0) == 0
    scheduler.demote(late, 6.1)
    assert scheduler.queued(0) == 1
    scheduler.arrive(other, 8.0)
    scheduler.add_replica(0, [0], 8.5)
    # Behind the one that can be in time, in the same batch: there is room for it.
    scheduler.on_timer(20.0 - 8.0)
    assert batches(scheduler) == [(0, 0, [1, 0], 12.0)]


def test_a_demoted_one_alone_is_served_at_once() -> None:
    scheduler = CentralScheduler([(PROFILE, Deferred())])
    scheduler.add_replica(0, [0], 0.0)
    scheduler.demote(Request(0, 0, 0.0, 12.0), 50.0)
    assert batches(scheduler) == [(0, 0, [0], 50.0)]
    assert scheduler.next_timer_s() == math.inf


def test_cancelled_ones_leave_the_batch() -> None:
    scheduler = CentralScheduler([(PROFILE, Timeout(2.0))])
    scheduler.add_replica(0, [0], 0.0)
    first, second = Request(0, 0, 0.0, 12.0), Request(1, 0, 0.0, 12.0)
    scheduler.arrive(first, 0.0)
    scheduler.arrive(second, 0.0)
    assert scheduler.cancel(first, 1.0)
    scheduler.on_timer(2.0)
    assert batches(scheduler) == [(0, 0, [1], 2.0)]
    assert not scheduler.cancel(second, 3.0)


def test_a_request_that_comes_back_stands_where_its_deadline_says() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())])
    for number, deadline_s in ((1, 30.0), (2, 31.0), (0, 29.0)):
        scheduler.arrive(Request(number, 0, 0.0, deadline_s), 1.0)
    scheduler.add_replica(0, [0], 2.0)
    assert batches(scheduler) == [(0, 0, [0, 1, 2], 2.0)]


def test_a_new_profile_counts_from_then_on() -> None:
    scheduler = CentralScheduler([(PROFILE, PlainDeferred())])
    scheduler.add_replica(0, [0], 0.0)
    scheduler.arrive(Request(0, 0, 0.0, 12.0), 0.0)
    assert scheduler.next_timer_s() == pytest.approx(5.0)
    scheduler.set_profile(0, LatencyProfile(alpha_s=2.0, beta_s=5.0), 1.0)
    assert scheduler.next_timer_s() == pytest.approx(3.0)


def test_what_cannot_be_is_named() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())])
    scheduler.add_replica(0, [0], 0.0)
    with pytest.raises(ValueError, match="replica 0"):
        scheduler.add_replica(0, [0], 0.0)
    with pytest.raises(ValueError, match="model 1"):
        scheduler.add_replica(1, [1], 0.0)
    with pytest.raises(ValueError, match="no model"):
        scheduler.add_replica(1, [], 0.0)
    scheduler.remove_replica(9, 0.0)
    scheduler.finished(9, 0.0)


def test_delays_may_change() -> None:
    scheduler = CentralScheduler([(PROFILE, PlainDeferred())])
    scheduler.add_replica(0, [0], 0.0)
    scheduler.add_replica(1, [0], 0.0)
    assert scheduler.idle(0) == 2
    scheduler.arrive(Request(0, 0, 0.0, 12.0), 0.0)
    scheduler.set_delays(Delays(control_s=0.5), 1.0)
    assert scheduler.next_timer_s() == pytest.approx(4.5)
    scheduler.on_timer(4.5)
    assert batches(scheduler) == [(0, 0, [0], 5.0)]
    assert scheduler.idle(0) == 1
    scheduler.remove_replica(1, 5.0)
    # Sent ahead while there are delays; without them the end is awaited.
    scheduler.arrive(Request(1, 0, 5.0, 17.5), 5.0)
    scheduler.on_timer(scheduler.next_timer_s())
    assert scheduler.next_timer_s() < 11.0
    scheduler.set_delays(Delays(), 10.25)
    scheduler.on_timer(10.9)
    assert batches(scheduler) == []
    scheduler.finished(0, 11.0)
    assert batches(scheduler) == [(0, 0, [1], 11.0)]


def test_a_full_batch_waits_for_nothing() -> None:
    profile = LatencyProfile(alpha_s=1.0, beta_s=5.0, most=2)
    for policy in (PlainDeferred(), Timeout(4.0), Deferred()):
        scheduler = CentralScheduler([(profile, policy)])
        for replica in range(3):
            scheduler.add_replica(replica, [0], 0.0)
        scheduler.arrive(Request(0, 0, 0.0, 20.0), 0.0)
        assert batches(scheduler) == []
        scheduler.arrive(Request(1, 0, 1.0, 21.0), 1.0)
        assert batches(scheduler) == [(0, 0, [0, 1], 1.0)]


def test_many_entries_of_waiting_models_are_cleaned_out() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())] * 2)
    scheduler.add_replica(0, [0, 1], 0.0)
    scheduler.arrive(Request(0, 0, 0.0, 900.0), 0.0)
    assert batches(scheduler) == [(0, 0, [0], 0.0)]
    for number in range(1, 400):
        scheduler.arrive(Request(number, number % 2, 0.01 * number, 500.0 + number), 0.01 * number)
    (group,) = scheduler._rank._groups.values()
    assert len(group._waiting) <= 2 * 2 + 64 + 1
    scheduler.finished(0, 6.0)
    ((model, replica, sent, start_s),) = batches(scheduler)
    assert (model, replica, len(sent), start_s) == (1, 0, 200, 6.0)


def test_models_that_get_fewer_requests_weigh_less() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())] * 2)
    for number in range(200):
        scheduler.arrive(Request(number, 0, 0.1 * number, 0.1 * number + 12.0), 0.1 * number)
    busy = scheduler._sides[0].around
    assert busy.rate_rps == pytest.approx(10.0)
    for number in range(200, 300):
        at_s = 100.0 * number
        scheduler.arrive(Request(number, 1, at_s, at_s + 12.0), at_s)
    assert busy.rate_rps < 0.1


def test_a_batch_that_would_miss_its_deadline_behind_a_late_replica_is_trimmed() -> None:
    side = ModelSide(PROFILE, Eager(), Delays(data_s=0.5))
    for number in range(3):
        side.queue.push(Request(number, 0, 0.0, 17.2))
    sent, start_s = side.release(3, 8.0, 10.0)
    assert ([request.number for request in sent], start_s) == ([0, 1], 10.0)


def test_timers_of_requests_that_can_wait_for_ever_do_not_gather() -> None:
    scheduler = CentralScheduler([(PROFILE, Eager())])
    for i in range(2000):
        at_s = 20.0 * i
        scheduler.arrive(Request(2 * i, 0, at_s, at_s + 1e9), at_s)  # waits: no replica is there
        scheduler.arrive(Request(2 * i + 1, 0, at_s, at_s + 10), at_s)
        scheduler.on_timer(at_s + 5)
    assert len(scheduler._drop_timers) < 100
    assert scheduler.next_timer_s() > 20.0 * 1999

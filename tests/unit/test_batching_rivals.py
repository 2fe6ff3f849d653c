"""The rivals' choices, worked by hand: whose batch is next, who is preempted, what is planned and routed."""

from __future__ import annotations

import pytest

from keystage.batching.api import Dispatch, Drop, Order, Preempt, Request
from keystage.batching.profile import LatencyProfile
from keystage.batching.rivals.central import EagerScheduler
from keystage.batching.rivals.clockwork import ClockworkScheduler
from keystage.batching.rivals.line import Line
from keystage.batching.rivals.nexus import NexusScheduler
from keystage.batching.rivals.nexus_plan import Session, pack, plan
from keystage.batching.rivals.shepherd import ShepherdScheduler

STEEP = LatencyProfile(1.0, 1.0)
FLAT = LatencyProfile(0.1, 2.0)


def shown(orders: list[Order]) -> list[object]:
    """Orders as tuples of numbers."""
    found: list[object] = []
    for order in orders:
        if isinstance(order, Dispatch):
            found.append((order.model, order.replica, [request.number for request in order.requests]))
        elif isinstance(order, Drop):
            found.append(("drop", [request.number for request in order.requests]))
        else:
            found.append(("preempt", order.replica))
    return found


def fill(
    scheduler: EagerScheduler, model: int, numbers: range, deadline_s: float, now_s: float = 0.0
) -> None:
    for number in numbers:
        scheduler.arrive(Request(number, model, now_s, deadline_s), now_s)


def test_clockwork_takes_the_candidate_whose_latest_moment_is_first() -> None:
    scheduler = ClockworkScheduler([STEEP, FLAT])
    scheduler.add_replica(0, [0, 1], 0)
    fill(scheduler, 0, range(1), 20)
    assert shown(scheduler.take()) == [(0, 0, [0])]
    # At 2: two of model 0 must begin by 20 - 3 = 17, five of model 1 by 18.5 - 2.5 = 16.
    fill(scheduler, 0, range(1, 3), 20, 1)
    fill(scheduler, 1, range(3, 8), 18.5, 1)
    scheduler.finished(0, 2)
    assert shown(scheduler.take()) == [(1, 0, [3, 4, 5, 6, 7])]
    # Had model 0 four waiting, by 15: urgency counts, not the deadline.
    again = ClockworkScheduler([STEEP, FLAT])
    fill(again, 0, range(1, 5), 20, 1)
    fill(again, 1, range(5, 10), 18.5, 1)
    again.add_replica(0, [0, 1], 2)
    assert shown(again.take()) == [(0, 0, [1, 2, 3, 4])]


def test_clockwork_makes_a_batch_as_large_as_its_head_allows_and_drops_the_hopeless() -> None:
    scheduler = ClockworkScheduler([STEEP])
    scheduler.arrive(Request(0, 0, 0, 5.5), 0)
    scheduler.arrive(Request(1, 0, 0, 8.0), 0)
    for number in range(2, 6):
        scheduler.arrive(Request(number, 0, 0, 9.0), 0)
    scheduler.add_replica(3, [0], 4)
    # 0 cannot make it: 4 + 2 > 5.5. 1 allows 8 - 4 = 4: three.
    assert shown(scheduler.take()) == [("drop", [0]), (0, 3, [1, 2, 3])]


def test_eager_rivals_take_the_smallest_replica_and_keep_to_what_it_hosts() -> None:
    scheduler = ShepherdScheduler([STEEP, FLAT])
    for replica, models in ((4, [0]), (2, [0]), (1, [1])):
        scheduler.add_replica(replica, models, 0)
    fill(scheduler, 0, range(3), 50)
    assert shown(scheduler.take()) == [(0, 2, [0]), (0, 4, [1])]
    assert scheduler.queued(0) == 1
    scheduler.remove_replica(2, 1)
    scheduler.finished(2, 2)
    assert scheduler.take() == []
    scheduler.finished(4, 2)
    assert shown(scheduler.take()) == [(0, 4, [2])]


def test_shepherd_takes_the_largest_batch() -> None:
    scheduler = ShepherdScheduler([STEEP, FLAT])
    fill(scheduler, 0, range(3), 20)
    fill(scheduler, 1, range(3, 8), 90)
    fill(scheduler, 0, range(8, 10), 4)
    scheduler.add_replica(0, [0, 1], 0)
    # Model 0's earliest deadline, 4, allows three of its five; model 1 has five.
    assert shown(scheduler.take()) == [(1, 0, [3, 4, 5, 6, 7])]


def test_shepherd_preempts_for_three_times_the_size_that_could_not_wait() -> None:
    scheduler = ShepherdScheduler([STEEP, FLAT])
    scheduler.add_replica(0, [0, 1], 0)
    scheduler.arrive(Request(0, 1, 0, 9.0), 0)  # runs 0 .. 2.1
    scheduler.take()
    for number in (1, 2):
        scheduler.arrive(Request(number, 0, 0.5, 5.0), 0.5)
    assert scheduler.take() == []  # twice the size
    scheduler.arrive(Request(3, 0, 0.5, 5.0), 0.5)
    # Three must begin by 1.0, the replica is free at 2.1.
    assert shown(scheduler.take()) == [("preempt", 0), (0, 0, [1, 2, 3])]
    assert scheduler.queued(1) == 1
    scheduler.finished(0, 4.5)
    assert shown(scheduler.take()) == [(1, 0, [0])]


@pytest.mark.parametrize(("deadline_s", "ratio"), [(6.2, 3.0), (5.0, float("inf"))])
def test_shepherd_lets_run_what_need_not_go(deadline_s: float, ratio: float) -> None:
    # Three that must begin by 2.2 can wait until 2.1; and it may be told never to preempt.
    scheduler = ShepherdScheduler([STEEP, FLAT], ratio)
    scheduler.add_replica(0, [0, 1], 0)
    scheduler.arrive(Request(0, 1, 0, 9.0), 0)
    scheduler.take()
    fill(scheduler, 0, range(1, 4), deadline_s, 0.5)
    assert not any(isinstance(order, Preempt) for order in scheduler.take())


def test_shepherd_cancels_the_smallest_batch_and_drops_what_that_costs() -> None:
    scheduler = ShepherdScheduler([STEEP, FLAT])
    fill(scheduler, 1, range(2), 9)
    scheduler.add_replica(0, [0, 1], 0)
    scheduler.add_replica(1, [0, 1], 0)
    scheduler.arrive(Request(2, 1, 0, 2.2), 0)
    assert shown(scheduler.take()) == [(1, 0, [0, 1]), (1, 1, [2])]
    fill(scheduler, 0, range(3, 6), 5, 0.5)
    # Request 2 would begin anew at 0.5 at best and end at 2.6.
    assert shown(scheduler.take()) == [("preempt", 1), ("drop", [2]), (0, 1, [3, 4, 5])]


def test_narrow_drops_heads_that_the_planned_batch_would_make_late() -> None:
    line = Line(STEEP)
    for number, deadline_s in enumerate((3.5, 4.5, 5.0, 9.0, 9.0)):
        line.queue.push(Request(number, 0, 0, deadline_s))
    # A batch of 3 takes 4: request 0 has 3.5.
    assert [request.number for request in line.narrow(0, 3)] == [0]
    assert line.narrow(0, 3) == []
    assert line.fit(0) == 3
    # Later on, three of the four take until 6; two of the last two until 5.
    assert [request.number for request in line.narrow(2, 3)] == [1, 2]


def test_a_model_that_fills_gpus_gets_them_at_half_its_slo() -> None:
    # Symphony's ResNet50: 2 l(7) <= 25 ms, 562.6 r/s a GPU.
    session = Session(LatencyProfile(1.053e-3, 5.072e-3), 0.025)
    nodes = pack({0: session}, {0: 1200.0})
    assert [dict(node.parts)[0].batch for node in nodes[:2]] == [7, 7]
    assert len(nodes) == 3
    assert sum(node.parts[0].rate_rps for node in nodes) == pytest.approx(1200)
    # The rest, 74.9 r/s: b / r + l(b) <= 25 ms holds for 1 and not for 2.
    assert nodes[2].parts[0].batch == 1
    assert nodes[2].cycle_s == pytest.approx(1 / nodes[2].parts[0].rate_rps)


def test_residues_share_a_gpu_when_their_batches_fit_the_shorter_cycle() -> None:
    slow, fast = Session(LatencyProfile(1.0, 2.0), 100.0), Session(LatencyProfile(1.0, 2.0), 40.0)
    nodes = pack({0: slow, 1: fast}, {0: 0.2, 1: 0.3})
    # Alone: b + 2 + b / 0.2 <= 100: 16 in 80 s; b + 2 + b / 0.3 <= 40: 8 in 26.7 s. Together: 6 and 8.
    assert len(nodes) == 1
    assert nodes[0].cycle_s == pytest.approx(8 / 0.3)
    assert {model: part.batch for model, part in nodes[0].parts.items()} == {0: 6, 1: 8}
    assert nodes[0].busy_s == pytest.approx(8 + 10)
    # Twice the load does not fit: 11 and 17 s of service in a cycle of 15 / 0.6.
    assert len(pack({0: slow, 1: fast}, {0: 0.4, 1: 0.6})) == 2


@pytest.mark.parametrize("nodes", [1, 3, 8, 20])
def test_a_plan_has_every_model_and_exactly_the_gpus_there_are(nodes: int) -> None:
    sessions = {model: Session(LatencyProfile(1e-3 * (1 + model), 5e-3), 0.05) for model in range(5)}
    rates = {0: 900.0, 1: 300.0, 2: 50.0, 3: 0.0, 4: 10.0}
    planned = plan(sessions, rates, nodes)
    assert len(planned) == nodes
    assert set().union(*(node.parts for node in planned)) == set(sessions)
    if nodes == 20:  # spare GPUs go where the load is
        assert sum(0 in node.parts for node in planned) >= 8


def test_nexus_deals_evenly_and_runs_its_models_in_turn_at_their_batches() -> None:
    session = Session(STEEP, 10.0)  # 2 l(b) <= 10: 4
    scheduler = NexusScheduler([session], [1.0])
    scheduler.add_replica(0, [0], 0)
    scheduler.add_replica(1, [0], 0)
    for number in range(12):
        scheduler.arrive(Request(number, 0, 0, 10.0), 0)
    assert shown(scheduler.take()) == [(0, 0, [0]), (0, 1, [1])]
    assert scheduler.queued(0) == 10
    scheduler.finished(0, 2)
    assert shown(scheduler.take()) == [(0, 0, [2, 4, 6, 8])]
    scheduler.finished(1, 2)
    assert shown(scheduler.take()) == [(0, 1, [3, 5, 7, 9])]
    # At 7 one is left on each and has until 10; at 8.5 it has not.
    scheduler.finished(0, 7)
    assert shown(scheduler.take()) == [(0, 0, [10])]
    scheduler.on_timer(8.5)
    assert shown(scheduler.take()) == [("drop", [11])]


def test_nexus_plans_anew_by_the_rates_of_the_last_epoch() -> None:
    sessions = [Session(STEEP, 10.0), Session(STEEP, 10.0)]
    scheduler = NexusScheduler(sessions, [2.0, 0.1], epoch_s=10.0)
    for replica in range(4):
        scheduler.add_replica(replica, [0, 1], 0)
    before: set[int] = set()
    after: set[int] = set()
    for number in range(60):  # all of it model 1's
        now_s = 0.2 * number
        scheduler.arrive(Request(number, 1, now_s, now_s + 10.0), now_s)
        found = {order.replica for order in scheduler.take() if isinstance(order, Dispatch)}
        if now_s < 10:
            before |= found
        else:
            after |= found
    assert len(before) == 1
    assert len(before | after) >= 3


def test_nexus_moves_what_waits_on_a_replica_that_goes() -> None:
    scheduler = NexusScheduler([Session(STEEP, 100.0)])
    scheduler.add_replica(0, [0], 0)
    scheduler.add_replica(1, [0], 0)
    for number in range(6):
        scheduler.arrive(Request(number, 0, 0, 100.0), 0)
    scheduler.take()
    scheduler.remove_replica(1, 1)
    assert scheduler.queued(0) == 4
    scheduler.finished(0, 2)
    assert shown(scheduler.take()) == [(0, 0, [2, 3, 4, 5])]


def test_a_replica_for_a_model_that_is_none_is_refused() -> None:
    for scheduler in (ClockworkScheduler([STEEP]), NexusScheduler([Session(STEEP, 1.0)])):
        with pytest.raises(ValueError, match=r"replica 0 is to serve"):
            scheduler.add_replica(0, [1], 0)

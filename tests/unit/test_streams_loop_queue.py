"""Who has begun a loop goes before who has not; within both, deadlines rule."""

from keystage.batching.api import Request
from keystage.batching.partial_slo import PartialSlo
from keystage.batching.profile import LatencyProfile
from keystage.streams.loop_queue import LoopQueue


def request(number, deadline_s):
    return Request(number, 0, 0.0, deadline_s)


def order(queue):
    return [one.number for one in queue.pop_front(len(queue))]


def test_those_that_come_back_stand_before_newcomers():
    queue = LoopQueue()
    queue.push(request(0, 5.0))
    queue.push_back(request(1, 9.0))
    queue.push(request(2, 4.0))
    queue.push_back(request(3, 8.0))
    assert len(queue) == 4
    assert order(queue) == [3, 1, 2, 0]


def test_equal_deadlines_stand_in_order_of_coming():
    queue = LoopQueue()
    for number in range(3):
        queue.push_back(request(number, 5.0))
    assert order(queue) == [0, 1, 2]


def test_a_request_that_begins_anew_is_a_newcomer():
    queue = LoopQueue()
    replayed = request(0, 1.0)
    queue.push_back(replayed)
    assert queue.pop_front(1) == [replayed]
    queue.push(replayed)
    queue.push_back(request(1, 9.0))
    assert order(queue) == [1, 0]


def test_taking_one_out_wherever_it_stands():
    queue = LoopQueue()
    kept, begun, new, demoted = (request(number, 5.0 + number) for number in range(4))
    queue.push_back(kept)
    queue.push_back(begun)
    queue.push(new)
    queue.demote(demoted)
    assert queue.remove(begun)
    assert queue.remove(new)
    assert queue.remove(demoted)
    assert not queue.remove(begun)
    assert order(queue) == [0]


def test_the_batch_policy_takes_the_loop_first_and_gives_up_who_is_too_late():
    queue = LoopQueue()
    queue.push(request(0, 10.0))
    queue.push_back(request(1, 0.5))
    queue.push_back(request(2, 20.0))
    profile = LatencyProfile(0.5, 0.5)
    candidate = PartialSlo(1.5).candidate(queue, profile, 0.0, 0.0)
    assert [one.number for one in queue.take_given_up()] == [1]
    assert candidate.size == 2
    assert order(queue) == [2, 0]

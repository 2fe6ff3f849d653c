"""Queue, gathering rules and free times: the data that the scheduler stands on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.batching.api import Request
from keystage.batching.free_times import NEVER_S, FreeTimes
from keystage.batching.gather import demoted_batch, fill, target
from keystage.batching.profile import LatencyProfile
from keystage.batching.queue import RequestQueue

PROFILE = LatencyProfile(alpha_s=1.0, beta_s=5.0)


def filled(*deadlines_s: float) -> RequestQueue:
    queue = RequestQueue()
    for number, deadline_s in enumerate(deadlines_s):
        queue.push(Request(number, 0, 0.0, deadline_s))
    return queue


def numbers(requests: list[Request]) -> list[int]:
    return [request.number for request in requests]


def test_deadline_order_first_come_first_among_equals() -> None:
    queue = filled(3.0, 1.0, 2.0, 1.0)
    assert [queue.at(place).number for place in range(4)] == [1, 3, 2, 0]
    assert queue.first_due(1.5) == 2
    assert queue.first_due(9.0) == 4
    with pytest.raises(IndexError, match="place 4"):
        queue.at(4)


def test_the_demoted_stand_behind_and_are_never_given_up() -> None:
    queue = filled(1.0, 2.0)
    queue.demote(Request(9, 0, 0.0, 0.5))
    assert (len(queue), queue.in_time, queue.demoted) == (3, 2, 1)
    queue.give_up(5)
    assert numbers(queue.take_given_up()) == [0, 1]
    assert queue.take_given_up() == []
    assert queue.head is None
    queue.push(Request(3, 0, 0.0, 4.0))
    assert numbers(queue.pop_front(5)) == [3, 9]


def test_removal_is_of_the_very_request() -> None:
    queue = filled(1.0, 1.0, 1.0)
    twin = Request(1, 0, 0.0, 1.0)
    assert not queue.remove(twin)
    assert queue.remove(queue.at(1))
    assert numbers(queue.pop_front(3)) == [0, 2]
    demoted = Request(5, 0, 0.0, 1.0)
    queue.demote(Request(4, 0, 0.0, 1.0))
    queue.demote(demoted)
    assert queue.remove(demoted)
    assert not queue.remove(demoted)
    assert numbers(queue.pop_front(3)) == [4]


def test_a_long_queue_is_cut_and_keeps_its_order() -> None:
    queue, out = RequestQueue(), []
    for number in range(1000):
        queue.push(Request(number, 0, 0.0, float(number)))
        if number % 2:
            out += numbers(queue.pop_front(1))
    out += numbers(queue.pop_front(1000))
    assert out == list(range(1000))


def test_fill_takes_what_fits_and_gives_up_a_hopeless_head() -> None:
    queue = filled(5.5, 9.0, 20.0, 20.0, 20.0)
    assert fill(queue, PROFILE, 0.0) == 4
    assert numbers(queue.take_given_up()) == [0]
    assert fill(queue, PROFILE, 4.0) == 3
    assert numbers(queue.take_given_up()) == [1]


def test_target_gives_up_heads_for_a_larger_batch() -> None:
    queue = filled(7.0, 7.5, 9.5, 10.0, 20.0, 20.0)
    assert target(queue, PROFILE, 0.0, 4) == 4
    assert numbers(queue.take_given_up()) == [0, 1]


def test_target_gives_nothing_up_when_too_few_wait_or_enough_fit() -> None:
    queue = filled(7.0, 7.5, 9.5)
    assert target(queue, PROFILE, 0.0, 3) == 2
    assert target(queue, PROFILE, 0.0, 2) == 2
    assert queue.take_given_up() == []


def test_demoted_ones_alone_make_no_larger_batch_than_would_have_been_in_time() -> None:
    queue = RequestQueue()
    assert demoted_batch(queue, PROFILE) == 0
    for number in range(20):
        queue.demote(Request(number, 0, 0.0, 12.0))
    assert demoted_batch(queue, PROFILE) == fill(queue, PROFILE, 100.0) == 7


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "discard", "put")),
            st.integers(0, 40),
            st.floats(0, 9) | st.sampled_from((-math.inf, math.inf)),
        ),
        max_size=120,
    ),
    st.floats(-1, 10),
)
def test_free_times_are_a_dictionary_with_a_smallest_number(
    steps: list[tuple[str, int, float]], by_s: float
) -> None:
    tree, model = FreeTimes(), dict[int, float]()
    for kind, number, free_s in steps:
        if kind == "add" and number not in model:
            tree.add(number)
            model[number] = NEVER_S
        elif kind == "discard" and number in model:
            tree.discard(number)
            del model[number]
        elif kind == "put" and number in model:
            tree.put(number, free_s)
            model[number] = free_s
        assert len(tree) == len(model)
        assert tree.least_s() == min(model.values(), default=NEVER_S)
        free = [known for known, at_s in model.items() if at_s <= by_s]
        assert tree.first(by_s) == min(free, default=None)
        assert all(tree.of(known) == at_s for known, at_s in model.items())

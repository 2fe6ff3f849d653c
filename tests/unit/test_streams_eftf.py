"""The order on a shared device: Figure 10's two cases as golden runs, and what is refused."""

import pytest

from keystage.streams.eftf import EftfQueue, SharingError
from keystage.streams.shared_device import SharedDevice, play

# Two modules, one SPU each of two, as in Figure 10: alone, a batch takes half its spatial time.
A, B = 0, 1


def test_figure_10_first_case_three_batches_of_a_go_before_b():
    courses = play([(A, 0.0, 0.5), (A, 0.0, 0.5), (A, 0.0, 0.5), (B, 0.0, 2.0)], [1, 1], 2)
    assert [course.spatial_s for course in courses] == [1.0, 2.0, 3.0, 4.0]
    assert [(course.start_s, course.end_s) for course in courses] == [
        (0, 0.5),
        (0.5, 1.0),
        (1.0, 1.5),
        (1.5, 3.5),
    ]
    assert not any(course.is_urgent for course in courses)


def test_figure_10_second_case_a_late_batch_of_a_runs_beside_b():
    # A's second batch comes at 1, while B runs; in space it would end at 2, B at 4.
    courses = play([(A, 0.0, 0.5), (B, 0.0, 2.0), (A, 1.0, 0.5)], [1, 1], 2)
    assert [course.spatial_s for course in courses] == [1.0, 4.0, 2.0]
    first, b, second = courses
    assert (first.start_s, first.end_s) == (0.0, 0.5)
    assert (second.start_s, second.end_s, second.is_urgent) == (1.0, 2.0, True)
    # B alone from 0.5 to 1, beside A at half the rate to 2, alone again: 0.5 + 0.5 + 1.0 of its 2.
    assert (b.start_s, b.end_s, b.is_urgent) == (0.5, 3.0, False)


def test_with_strict_priority_the_urgent_batch_takes_the_whole_device():
    _, b, second = play([(A, 0.0, 0.5), (B, 0.0, 2.0), (A, 1.0, 0.5)], [1, 1], 2, strict=True)
    assert second.end_s == 1.5
    assert b.end_s == 3.0


def test_without_running_beside_the_late_batch_would_break_its_bound():
    queue = EftfQueue([1, 3], 4)
    queue.push(1, "b", 0.0, 3.0)
    running = queue.pop()
    bound_s = queue.push(0, "a", 0.5, 0.25)
    # Waiting for b would end at 3.25, the spatial split at 1.5: that is why a starts at once.
    assert (running.finish_s, bound_s) == (4.0, 1.5)
    urgent = queue.pop()
    assert (urgent.batch, urgent.is_urgent) == ("a", True)
    assert queue.is_running(0)
    assert queue.is_running(1)


def test_a_later_finisher_waits_for_what_runs():
    queue = EftfQueue([1, 1], 2)
    queue.push(0, "first", 0.0, 1.0)
    first = queue.pop()
    queue.push(1, "second", 0.5, 1.0)
    assert queue.pop() is None
    assert (len(queue), queue.waiting(1), queue.running) == (1, 1, (first,))
    queue.ended(first)
    assert queue.pop().batch == "second"


def test_one_batch_of_a_module_at_a_time():
    queue = EftfQueue([1, 1], 2)
    queue.push(1, "long", 0.0, 9.0)
    queue.push(0, "one", 0.0, 1.0)
    queue.push(0, "two", 0.0, 1.0)
    assert queue.pop().batch == "one"
    assert queue.pop() is None


def test_equal_finish_times_go_in_order_of_coming():
    queue = EftfQueue([1, 1], 2)
    queue.push(1, "earlier", 0.0, 1.0)
    queue.push(0, "later", 0.0, 1.0)
    assert queue.pop().batch == "earlier"


@pytest.mark.parametrize(
    ("spus", "device", "text"),
    [([0, 1], 2, "module 0 needs at least 1 SPU"), ([3, 3], 5, "has 5 SPUs, its modules were given 6")],
)
def test_shares_that_cannot_be_are_refused(spus, device, text):
    with pytest.raises(SharingError, match=text):
        EftfQueue(spus, device)


def test_a_batch_that_takes_no_time_is_refused():
    with pytest.raises(SharingError, match="module 0 must take more than 0 s, it takes 0"):
        EftfQueue([1], 1).push(0, "b", 0.0, 0.0)


def test_the_end_of_what_does_not_run_is_refused():
    queue = EftfQueue([1], 1)
    queue.push(0, "b", 0.0, 1.0)
    turn = queue.pop()
    queue.ended(turn)
    with pytest.raises(SharingError, match="batch 0 of module 0 does not run"):
        queue.ended(turn)


def test_a_device_on_which_nothing_runs_ends_nothing():
    device = SharedDevice()
    assert device.next_end_s() == float("inf")
    with pytest.raises(ValueError, match="no batch runs"):
        device.end_next()


def test_busy_time_counts_while_anything_runs():
    device = SharedDevice()
    device.start(0, 1, 2.0, 1.0)
    device.start(1, 3, 0.75, 1.0)
    assert (device.next_end_s(), device.end_next()) == (2.0, 1)
    assert device.end_next() == 0
    assert device.busy_s == 2.75


def test_what_waits_can_be_looked_at_in_order_and_taken_out():
    queue = EftfQueue([1, 1], 2)
    for module, name, seconds in ((0, "slow", 4.0), (1, "quick", 1.0), (1, "next", 1.0)):
        queue.push(module, name, 0.0, seconds)
    assert list(queue) == ["quick", "next", "slow"]
    assert queue.discard(lambda batch: batch == "quick") == ["quick"]
    assert queue.discard(lambda batch: batch == "quick") == []
    turn = queue.pop()
    assert (turn.batch, turn.finish_s) == ("next", 4.0)

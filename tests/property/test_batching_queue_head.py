"""The head that a queue keeps is the first of those in time, whatever came, went or was given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.batching.api import Request
from keystage.batching.queue import RequestQueue
from keystage.streams.loop_queue import LoopQueue

steps = st.lists(
    st.tuples(st.sampled_from(("push", "back", "demote", "remove", "pop", "give up")), st.integers(0, 5)),
    max_size=60,
)


@pytest.mark.parametrize("kind", [RequestQueue, LoopQueue])
@given(steps)
def test_the_head_is_the_first_in_time(kind: type[RequestQueue], happens: list[tuple[str, int]]) -> None:
    queue, known = kind(), list[Request]()
    for number, (what, value) in enumerate(happens):
        request = Request(number, 0, 0.0, float(value))
        if what in ("push", "back", "demote"):
            known.append(request)
        if what == "demote":
            queue.demote(request)
        elif what == "back" and isinstance(queue, LoopQueue):
            queue.push_back(request)
        elif what in ("push", "back"):
            queue.push(request)
        elif what == "remove" and known:
            queue.remove(known[value % len(known)])
        elif what == "pop":
            queue.pop_front(value)
        elif what == "give up":
            queue.give_up(value)
        assert queue.head is (queue.at(0) if queue.in_time else None)
        assert queue.has_given_up or not queue.take_given_up()

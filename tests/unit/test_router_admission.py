"""The entry gate and the states of a request."""

from __future__ import annotations

import pytest

from keystage.router.admission import AdmissionBounds, Gate
from keystage.router.engine import QueueFull
from keystage.router.sessions import IllegalTransitionError, SessionState, advance


def test_both_bounds_hold_and_places_come_back() -> None:
    gate = Gate(AdmissionBounds(queue_items=2, queue_bytes=10))
    gate.enter(6)
    with pytest.raises(QueueFull, match="6 bytes wait, 5 more exceed the bound of 10"):
        gate.enter(5)
    gate.enter(4)
    with pytest.raises(QueueFull, match="2 requests wait, the bound is 2") as full:
        gate.enter(0)
    assert full.value.retry_after_s == 5.0
    gate.leave(6)
    gate.enter(5)
    assert (gate.items, gate.bytes) == (2, 9)


def test_retry_after_follows_the_completion_rate() -> None:
    gate = Gate(AdmissionBounds())
    for _ in range(40):
        gate.enter(1)
    for i in range(200):
        gate.completed(i * 0.5)
    assert gate.retry_after_s() in (10.0, 11.0)
    for i in range(200):
        gate.completed(1000 + i * 30.0)
    assert gate.retry_after_s() == 60.0


ENDS = {SessionState.FINISHED, SessionState.FAILED, SessionState.REFUSED, SessionState.CANCELLED}


@pytest.mark.parametrize("end", sorted(ENDS))
def test_an_end_is_final(end: SessionState) -> None:
    for to in SessionState:
        with pytest.raises(IllegalTransitionError, match=f"{end} to {to}"):
            advance(end, to)


def test_a_request_that_never_ran_cannot_finish() -> None:
    with pytest.raises(IllegalTransitionError):
        advance(SessionState.QUEUED, SessionState.FINISHED)
    assert advance(SessionState.RUNNING, SessionState.QUEUED) is SessionState.QUEUED

"""The worker's life: which transitions exist, and what its probes answer."""

from __future__ import annotations

import itertools

import pytest

from keystage.worker.states import IllegalTransitionError, WorkerState, advance, is_alive, is_ready

ALLOWED = {
    ("loading", "warming"), ("loading", "stopped"), ("loading", "failed"),
    ("warming", "ready"), ("warming", "stopped"), ("warming", "failed"),
    ("ready", "draining"), ("ready", "failed"),
    ("draining", "stopped"), ("draining", "failed"),
}  # fmt: skip


@pytest.mark.parametrize(("now", "to"), list(itertools.product(WorkerState, WorkerState)))
def test_only_the_table_is_allowed(now: WorkerState, to: WorkerState) -> None:
    if (now.value, to.value) in ALLOWED:
        assert advance(now, to) is to
    else:
        with pytest.raises(IllegalTransitionError, match=f"{now.value} to {to.value}"):
            advance(now, to)


def test_probes() -> None:
    assert [s for s in WorkerState if not is_alive(s)] == [WorkerState.FAILED]
    assert [s for s in WorkerState if is_ready(s)] == [WorkerState.READY]

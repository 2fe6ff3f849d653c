"""The worker's life as a transition table; pure. `app` drives it, `http` shows it.

`loading -> warming -> ready -> draining -> stopped`, and `failed` from any but `stopped`.
"""

from __future__ import annotations

from enum import StrEnum


class WorkerState(StrEnum):
    """Where a worker stands; the values appear in `Heartbeat` and in logs."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_NEXT: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.LOADING: frozenset({WorkerState.WARMING, WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.WARMING: frozenset({WorkerState.READY, WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.DRAINING: frozenset({WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.STOPPED: frozenset(),
    WorkerState.FAILED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A bug of ours: it names both states."""


def advance(now: WorkerState, to: WorkerState) -> WorkerState:
    """Returns `to`.

    Raises:
        IllegalTransitionError: the table does not allow it.
    """
    if to not in _NEXT[now]:
        raise IllegalTransitionError(f"a worker cannot go from {now} to {to}")
    return to


def is_alive(state: WorkerState) -> bool:
    """What `/_/health` answers."""
    return state is not WorkerState.FAILED


def is_ready(state: WorkerState) -> bool:
    """What `/_/ready` answers: weights are resident, the warm-up ran, new work is welcome."""
    return state is WorkerState.READY

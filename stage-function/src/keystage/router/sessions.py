"""What the router keeps of a request until its end, and the states it goes through. Pure.

A looping session is `queued -> running -> finished`, back to `queued` when a worker of its path is
lost; a single-pass item is `queued(k) -> serving(k) -> queued(k+1) ... -> finished`. The epoch grows
with every new path; what carries an older one is dropped.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from keystage.router.engine import Generation, Refusal
from keystage.wire.api import SessionSpec, TensorRef


class SessionState(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


_NEXT: dict[SessionState, frozenset[SessionState]] = {
    SessionState.QUEUED: frozenset(
        {SessionState.RUNNING, SessionState.REFUSED, SessionState.FAILED, SessionState.CANCELLED}
    ),
    SessionState.RUNNING: frozenset(
        {
            SessionState.RUNNING,
            SessionState.QUEUED,
            SessionState.FINISHED,
            SessionState.FAILED,
            SessionState.REFUSED,
            SessionState.CANCELLED,
        }
    ),
    SessionState.FINISHED: frozenset(),
    SessionState.FAILED: frozenset(),
    SessionState.REFUSED: frozenset(),
    SessionState.CANCELLED: frozenset(),
}


class IllegalTransitionError(Exception):
    """A bug of ours: it names both states."""


def advance(now: SessionState, to: SessionState) -> SessionState:
    """Returns `to`.

    Raises:
        IllegalTransitionError: the table does not allow it.
    """
    if to not in _NEXT[now]:
        raise IllegalTransitionError(f"a session cannot go from {now} to {to}")
    return to


@dataclasses.dataclass(slots=True)
class Session:
    """A looping request.

    Attributes:
        number: router-unique.
        request: what was asked for.
        tokens: prompt and all tokens so far.
        arrived_s: when it was admitted.
        deadline_s: when it is too late.
        state: see `SessionState`.
        epoch: epoch of the current path.
        path: current path, None when queued.
        bound_s: when it was last bound.
        losses: workers lost or refusals suffered.
    """

    number: int
    request: Generation
    tokens: list[int]
    arrived_s: float
    deadline_s: float
    state: SessionState = SessionState.QUEUED
    epoch: int = 0
    path: int | None = None
    bound_s: float = 0.0
    losses: int = 0

    @property
    def reservation(self) -> int:
        """KV positions it needs at every stage."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_complete(self) -> bool:
        """Whether the last token ended it."""
        generated = self.generated
        return generated >= self.request.max_tokens or (generated > 0 and self.tokens[-1] in self.request.eos)

    def spec(self) -> SessionSpec:
        """The message form, for `Start` and `Move`."""
        request = self.request
        assert self.path is not None
        return SessionSpec(
            self.number,
            self.epoch,
            self.path,
            list(self.tokens),
            len(request.prompt),
            request.max_tokens,
            list(request.eos),
            request.temperature,
            request.top_p,
            request.seed,
        )


@dataclasses.dataclass(slots=True)
class Item:
    """A single-pass request.

    Attributes:
        number: router-unique.
        payload: the input, kept for replay.
        arrived_s: when it was admitted.
        deadline_s: when it is too late.
        stage: stage it waits for or is served by.
        state: QUEUED or RUNNING, then an end.
        epoch: grows when it starts over.
        queued_s: when it joined the current queue.
        dispatched_s: when it was sent to a worker.
        worker: replica serving it.
        ref: where its input for `stage` lies; None at stage 0.
        producer: replica that parked it.
        losses: workers lost.
    """

    number: int
    payload: bytes
    arrived_s: float
    deadline_s: float
    stage: int = 0
    state: SessionState = SessionState.QUEUED
    epoch: int = 0
    queued_s: float = 0.0
    dispatched_s: float = 0.0
    worker: str | None = None
    ref: TensorRef | None = None
    producer: str | None = None
    losses: int = 0


# ---------------------------------------------------------------- what a core tells its shell


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for a client; `done` when they end the session."""

    session: int
    tokens: list[int]
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a finished single-pass request."""

    session: int
    payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """A request ends without (the rest of) its answer, for a named reason."""

    session: int
    refusal: Refusal


Outcome = Deliver | Answer | Refuse

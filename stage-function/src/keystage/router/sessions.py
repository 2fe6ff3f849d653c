"""What the router keeps of a request until its end, and the states it goes through. Pure.

A looping session is `queued -> running -> finished`, back to `queued` when a worker of its path is
lost; a single-pass item is `queued(k) -> serving(k) -> queued(k+1) ... -> finished`. The epoch grows
with every new path; what carries an older one is dropped.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum

from keystage.models.blocks import BLOCK_TOKENS, blocks_for
from keystage.router.engine import Generation, Refusal
from keystage.router.fair_queue import Waiter
from keystage.router.trails import Trail
from keystage.wire.api import SessionSpec, TensorRef

KV_AHEAD_TOKENS = 64
"""Tokens to come for which a session takes credit. Most answers are far shorter than their `max_tokens`:
taking all of it would leave most of the KV state empty. 64 is an ordinary short answer, and four blocks:
sessions that outgrow it are a matter for the owner of the path, who preempts the youngest."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Handing:
    """A move for which the KV state of one stage is being copied; the session runs on meanwhile.

    Attributes:
        addresses: the path that it goes to.
        source: worker that has the state.
        target: worker that gets it; its credit is taken already.
        since_s: when it began.
    """

    addresses: tuple[str, ...]
    source: str
    target: str
    since_s: float


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
        losses: refusals suffered since its last token.
        held_kv: KV positions of credit it has taken on its path.
        handing: the move under way, None for none.
        trail: what is noted for its trace, None: it has none.
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
    held_kv: int = 0
    handing: Handing | None = None
    trail: Trail | None = None

    @property
    def most_kv(self) -> int:
        """KV positions it can ever need at every stage."""
        return len(self.request.prompt) + self.request.max_tokens

    @property
    def reservation(self) -> int:
        """KV positions of credit it takes at every stage: whole blocks, for what it has and some to come."""
        ahead = min(self.request.max_tokens - self.generated, KV_AHEAD_TOKENS)
        return BLOCK_TOKENS * blocks_for(len(self.tokens) + ahead)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left_tokens(self) -> int:
        """Tokens that it may still generate, at least 1."""
        return max(1, self.request.max_tokens - self.generated)

    @property
    def waiter(self) -> Waiter:
        """What the queue knows of it; its work is that of its tokens, those there and those to come."""
        request = self.request
        cost = len(self.tokens) + self.left_tokens
        return Waiter(self.number, request.tenant, request.priority, cost)

    @property
    def is_complete(self) -> bool:
        """Whether the last token ended it."""
        generated = self.generated
        return generated >= self.request.max_tokens or (generated > 0 and self.tokens[-1] in self.request.eos)

    def spec(self, kept: int = 0) -> SessionSpec:
        """The message form, for `Start` and `Move`; `kept` positions of KV state are there already."""
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
            request.input,
            request.whole,
            kept,
            self.trail is not None,
        )


@dataclasses.dataclass(slots=True)
class Item:
    """A single-pass request.

    Attributes:
        number: router-unique.
        payload: the input, kept for replay.
        arrived_s: when it was admitted.
        deadline_s: when it is too late.
        dtype: element type of the payload.
        shape: its shape, one axis of bytes where it is none.
        stage: stage it waits for or is served by.
        last: while it is served: the last stage that this worker takes it through.
        state: QUEUED or RUNNING, then an end.
        epoch: grows when it starts over.
        queued_s: when it joined the current queue.
        dispatched_s: when it was sent to a worker.
        worker: replica serving it.
        ref: where its input for `stage` lies; None at stage 0.
        producer: replica that parked it.
        losses: failures suffered.
        due_s: when it should be answered: its own deadline or the pipeline's objective, infinite for neither.
    """

    number: int
    payload: bytes
    arrived_s: float
    deadline_s: float
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    stage: int = 0
    last: int = 0
    state: SessionState = SessionState.QUEUED
    epoch: int = 0
    queued_s: float = 0.0
    dispatched_s: float = 0.0
    worker: str | None = None
    ref: TensorRef | None = None
    producer: str | None = None
    losses: int = 0
    due_s: float = math.inf

    def too_late(self, now_s: float) -> str:
        """Why it is given up at its deadline."""
        limit_s, taken_s = self.deadline_s - self.arrived_s, now_s - self.arrived_s
        return f"deadline of {limit_s:.3g} s passed at stage {self.stage} after {taken_s:.3g} s"

    def no_time(self, now_s: float, stages: int) -> str:
        """Why it is given up before its deadline."""
        return (
            f"its deadline of {self.due_s - self.arrived_s:.3g} s cannot be met any more: "
            f"{now_s - self.arrived_s:.3g} s have passed and it waits for stage {self.stage} of "
            f"{stages} (KEYSTAGE_LATE=refuse)"
        )


# ---------------------------------------------------------------- what a core tells its shell


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for a client; `done` when they end the session."""

    session: int
    tokens: list[int]
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a finished request of a single-pass pipeline or a stream program.

    `content_type` is a program's own, empty otherwise.
    """

    session: int
    payload: bytes
    content_type: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """A request ends without (the rest of) its answer, for a named reason."""

    session: int
    refusal: Refusal


Outcome = Deliver | Answer | Refuse

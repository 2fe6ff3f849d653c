"""The clients that wait for a router's answers; on the event loop, for `node`.

Before it: a core says by `Outcome`s what clients are to be told. After it: the HTTP face takes tokens from a
stream or awaits an answer. What they got is counted in `served`, and noted for their traces.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, assert_never

from keystage.router.batch_settings import BatchSettings
from keystage.router.engine import Enough, Generation, InvalidRequest, Refusal
from keystage.router.looping import LoopingCore
from keystage.router.served import Pace, Served
from keystage.router.sessions import Answer, Deliver, Outcome, Refuse
from keystage.router.streams import TokenStream
from keystage.router.traces import Traces
from keystage.router.trails import Trail
from keystage.wire.events import EventLog

LEAST_OURS = 429
"""A refusal with this status or a higher one is no fault of the request: it misses its objective by it."""


class Core(Protocol):
    """What is asked of the core of a single-pass pipeline or a stream program."""

    trails: dict[int, Trail]

    def cancel(self, number: int, now_s: float) -> None:
        """The client went away."""


class Clients:
    """Streams and answers by request number.

    Args:
        events: event log.
        pipeline: name of the pipeline.
        settings: say the pipeline's objective.
        send_soon: sends what a core wants sent, once what comes within one turn of the event loop is there.
        send: the same, now.

    Attributes:
        traces: makes spans, None: nobody is traced.
        streams: of looping requests.
        answers: of the others.
        refused: refusals by reason.
        served: what clients got; None: it is not counted.
    """

    def __init__(
        self,
        events: EventLog,
        pipeline: str,
        settings: BatchSettings | None,
        send_soon: Callable[[], None],
        send: Callable[[], None],
    ) -> None:
        self._events = events
        self._pipeline = pipeline
        self._settings = settings or BatchSettings()
        self._send_soon = send_soon
        self._send = send
        self.traces: Traces | None = None
        self.streams: dict[int, TokenStream] = {}
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.refused: dict[str, int] = {}
        self.served: Served | None = Served()

    def tell(self, outcome: Outcome) -> None:
        """Tells one client; those that went away are not told."""
        match outcome:
            case Deliver(session, tokens, done):
                stream = self.streams.get(session)
                if stream is not None:
                    stream.push(tokens, done)
            case Answer():
                answer = self.answers.get(outcome.session)
                if answer is not None and not answer.done():
                    answer.set_result(outcome)
            case Refuse(session, refusal):
                self._refuse(session, refusal)
            case _:
                assert_never(outcome)

    async def generate(self, core: LoopingCore | None, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine.generate`.

        Args:
            core: of the pipeline, None where it is none that loops.
            request: what is asked for.
        """
        if core is None:
            raise InvalidRequest(f"pipeline {self._pipeline} is single-pass and generates no tokens")
        begun_s = time.monotonic()
        trail = self.traces.begin(begun_s) if self.traces is not None else None
        try:
            number = core.submit(request, begun_s, trail)
        except Refusal as refusal:
            self._turned_away(refusal, request.deadline_s)
            raise
        stream = self.streams[number] = TokenStream()
        self._events.write("queued", session=number, prompt=len(request.prompt))
        self._send()
        why: BaseException | None = None
        is_unanswered = True
        pace = Pace(begun_s)
        try:
            while tokens := await stream.take():
                if pace.came(len(tokens), time.monotonic()):
                    self._first_token(pace, trail)
                yield tokens
            is_unanswered = False
        except Enough:  # a stop string: that is an answer
            is_unanswered = False
        except BaseException as error:
            why = error
            raise
        finally:
            del self.streams[number]
            if not stream.is_done:
                core.cancel(number, time.monotonic())
                self._events.write("cancelled", session=number)
                self._send()
            self._ended(begun_s, request.deadline_s, trail, why, is_answered=not is_unanswered, pace=pace)

    async def answered(self, core: Core, submit: Callable[[], int], deadline_s: float | None) -> Answer:
        """Submits a request and waits for its answer.

        Args:
            core: it is submitted to.
            submit: does so, and gives its number.
            deadline_s: within which it wants its answer, None: it does not say.

        Raises:
            Refusal: it was refused.
        """
        begun_s = time.monotonic()
        try:
            number = submit()
        except Refusal as refusal:
            self._turned_away(refusal, deadline_s)
            raise
        self._events.write("queued", session=number)
        trail = self.traces.begin(begun_s) if self.traces is not None else None
        if trail is not None:
            core.trails[number] = trail
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        self._send_soon()
        why: BaseException | None = None
        try:
            return await answer
        except asyncio.CancelledError as error:
            why = error
            core.cancel(number, time.monotonic())
            self._send()
            raise
        except Refusal as error:
            why = error
            raise
        finally:
            self.answers.pop(number, None)
            if trail is not None:
                del core.trails[number]
            self._ended(begun_s, deadline_s, trail, why, is_answered=why is None)

    def count_refusal(self, refusal: Refusal) -> None:
        """A request is refused."""
        self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1

    def _turned_away(self, refusal: Refusal, deadline_s: float | None) -> None:
        self.count_refusal(refusal)
        if self.served is not None and refusal.status >= LEAST_OURS:
            self.served.ended(self._settings.is_met(math.inf, deadline_s, math.inf))

    def _first_token(self, pace: Pace, trail: Trail | None) -> None:
        if self.served is not None:
            trace_id, at_s = (trail.trace_id, time.time()) if trail is not None else (b"", 0.0)
            self.served.first_token.observe(pace.first_s or 0.0, trace_id, at_s)

    def _ended(
        self,
        begun_s: float,
        deadline_s: float | None,
        trail: Trail | None,
        why: BaseException | None,
        *,
        is_answered: bool,
        pace: Pace | None = None,
    ) -> None:
        """A request has its answer, was refused, or its client left: that counts for no objective."""
        is_missed = isinstance(why, Refusal) and why.status >= LEAST_OURS
        if self.served is not None and (is_answered or is_missed):
            now_s = time.monotonic()
            taken_s = now_s - begun_s if is_answered else math.inf
            if is_answered:
                trace_id, at_s = (trail.trace_id, time.time()) if trail is not None else (b"", 0.0)
                self.served.answer.observe(taken_s, trace_id, at_s)
            first_s = (pace.first_s if pace is not None else None) if is_answered else math.inf
            token_s = pace.token_s(now_s) if pace is not None else None
            self.served.ended(self._settings.is_met(taken_s, deadline_s, first_s, token_s))
        if trail is not None and self.traces is not None:
            self.traces.end(trail, why)

    def _refuse(self, session: int, refusal: Refusal) -> None:
        self.count_refusal(refusal)
        self._events.write("refused", session=session, code=refusal.code)
        stream = self.streams.get(session)
        if stream is not None:
            stream.refuse(refusal)
        answer = self.answers.get(session)
        if answer is not None and not answer.done():
            answer.set_exception(refusal)

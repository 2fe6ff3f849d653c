"""The clients that wait for a router's answers; on the event loop, for `node`.

Before it: a core says by `Outcome`s what clients are to be told. After it: the HTTP face takes tokens from a
stream or awaits an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

from keystage.router.engine import Refusal
from keystage.router.sessions import Answer, Deliver, Outcome, Refuse
from keystage.router.streams import TokenStream
from keystage.wire.events import EventLog


class Clients:
    """Streams and answers by request number.

    Args:
        events: event log.

    Attributes:
        streams: of looping requests.
        answers: of the others.
        refused: refusals by reason.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.streams: dict[int, TokenStream] = {}
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.refused: dict[str, int] = {}

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

    async def answered(
        self, submit: Callable[[], int], send: Callable[[], None], give_up: Callable[[int], None]
    ) -> Answer:
        """Submits a request and waits for its answer.

        Args:
            submit: gives its number.
            send: sends what the core wants sent.
            give_up: called with the number if the client stops waiting.

        Raises:
            Refusal: it was refused.
        """
        try:
            number = submit()
        except Refusal as refusal:
            self.count_refusal(refusal)
            raise
        self._events.write("queued", session=number)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        send()
        try:
            return await answer
        except asyncio.CancelledError:
            give_up(number)
            raise
        finally:
            self.answers.pop(number, None)

    def count_refusal(self, refusal: Refusal) -> None:
        """A request is refused."""
        self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1

    def _refuse(self, session: int, refusal: Refusal) -> None:
        self.count_refusal(refusal)
        self._events.write("refused", session=session, code=refusal.code)
        stream = self.streams.get(session)
        if stream is not None:
            stream.refuse(refusal)
        answer = self.answers.get(session)
        if answer is not None and not answer.done():
            answer.set_exception(refusal)

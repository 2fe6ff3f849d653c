"""One request under way: what is sent, who carries it, and what was read of its answer so far.

Made by `client`, carried by a connection of `http1` or `http2`. It holds no behaviour but starting anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from keystage.loadgen.sending.answers import Answer
from keystage.loadgen.sending.row import Row

if TYPE_CHECKING:
    from keystage.loadgen.sending.route import Route


class Carrier(Protocol):
    """Whatever works on an exchange: a connection, or the making of one."""

    def drop(self, exchange: Exchange) -> None:
        """Ends the work on an exchange of which nobody wants to hear again."""


class Exchange:
    """A request under way.

    Attributes:
        row: filled when it has ended.
        body: what is sent.
        route: where to.
        answer: what was read of the answer to this attempt.
        carrier: who works on it, None between attempts.
        deadline_s: when it has failed, seconds since the start.
        moves: how often it was moved to another connection because no byte of it can have been processed.
    """

    __slots__ = ("answer", "body", "carrier", "deadline_s", "moves", "route", "row")

    def __init__(self, row: Row, body: bytes, route: Route, deadline_s: float) -> None:
        self.row = row
        self.body = body
        self.route = route
        self.deadline_s = deadline_s
        self.moves = 0
        self.carrier: Carrier | None = None
        self.answer: Answer = route.new_answer()

    def begin_again(self) -> None:
        """Forgets what was read, for the next attempt."""
        self.carrier = None
        self.answer = self.route.new_answer()


class Outcomes(Protocol):
    """Who is told how an exchange went: `client`."""

    start_s: float
    """`time.monotonic()` of the start of the run."""

    def answered(self, exchange: Exchange, now_s: float) -> None:
        """The whole answer has come."""

    def failed(self, exchange: Exchange, error: str, *, processed: bool = True) -> None:
        """This attempt has failed with `class: detail`.

        Args:
            exchange: which.
            error: why.
            processed: False only where no byte of the request can have been processed.
        """

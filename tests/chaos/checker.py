"""Holds what clients got against what is right. Pure.

Before it: `client` noted what came for one request, over all its connections. After it: `report` counts
verdicts; a run with lost, wrong or duplicated ones has failed.

- *lost*: no answer within its bound, or a refusal that no policy of the load allows.
- *wrong*: the answer is another one (a token, fewer tokens than asked, finish reason), or a piece is missing
  before an event.
- *duplicated*: a token was delivered again behind what the client had said it has, an answer is longer than
  what was asked, or more tokens are billed than were made.
- *late*: right, but after its deadline. *refused*: by name, for a deadline that a fault can break; who has
  time enough for every fault and is refused for it was lost in truth.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from chaos.requests import DEADLINE_S, Request

Verdict = Literal["right", "late", "refused", "lost", "wrong", "duplicated"]
FAILING: tuple[Verdict, ...] = ("lost", "wrong", "duplicated")
ALLOWED = frozenset({"deadline_exceeded", "deadline_unreachable"})
"""Reasons for which a request of this load may be refused: its own deadline, passed or out of reach at every
try."""
LATE_S = 0.5
"""An answer is on its way for so long at most: what it takes from router to client is not the deadline's."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What came for one request.

    Attributes:
        begun_s: when it was first sent, Unix seconds.
        ended_s: when its end was known, 0: never.
        tokens: what the client has, in order, without what it dropped.
        times_s: when each token came (streamed).
        repeated: tokens that came again although the client had said that it has them.
        skipped: tokens that are missing before an event, by the event's own number.
        changed: pieces that came again from the first token on, and were others.
        finish: finish reason, empty: none came.
        billed: completion tokens as the last answer counts them, -1: it did not say.
        refused: code of a refusal.
        said: its words, or what broke the last connection.
        breaks_s: when connections broke.
        resumed: connections that went on behind a position.
    """

    begun_s: float
    ended_s: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    repeated: int = 0
    skipped: int = 0
    changed: int = 0
    finish: str = ""
    billed: int = -1
    refused: str = ""
    said: str = ""
    breaks_s: list[float] = dataclasses.field(default_factory=list)
    resumed: int = 0

    @property
    def taken_s(self) -> float:
        """From first sent to the end."""
        return self.ended_s - self.begun_s

    def pause_s(self, at_s: float) -> float | None:
        """How long the next token was away after a moment within a stream; None: it is not within."""
        for before_s, after_s in itertools.pairwise([self.begun_s, *self.times_s]):
            if before_s <= at_s < after_s:
                return after_s - at_s
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and its reason."""

    verdict: Verdict
    reason: str = ""


def judge(request: Request, answer: Answer) -> Judged:
    """Says what became of a request."""
    expected = list(request.case.expected)
    if answer.refused in ALLOWED:
        # What came before it must be right all the same.
        found = _differs(expected[: len(answer.tokens)], answer)
        if found is None and request.deadline_s >= DEADLINE_S:
            return Judged("lost", f"{answer.refused}: {request.deadline_s:g} s are enough for any fault")
        return found or Judged("refused", answer.refused)
    if answer.refused:
        return Judged("lost", f"refused: {answer.refused}: {answer.said}")
    if not answer.ended_s:
        return Judged(
            "lost", f"{len(answer.tokens)} of {len(expected)} tokens came, {answer.said or 'then nothing'}"
        )
    found = _differs(expected, answer)
    if found is not None:
        return found
    if answer.finish != "length":
        return Judged("wrong", f"finish reason {answer.finish!r}, not 'length'")
    if answer.billed not in (-1, len(expected)):
        kind: Verdict = "duplicated" if answer.billed > len(expected) else "wrong"
        return Judged(kind, f"{answer.billed} tokens billed, {len(expected)} made")
    if answer.taken_s > request.deadline_s + LATE_S:
        return Judged("late", f"after {answer.taken_s:.1f} s of {request.deadline_s:g} s")
    return Judged("right")


def _differs(expected: list[int], answer: Answer) -> Judged | None:
    """What is wrong with tokens that ought to be these."""
    if answer.repeated:
        return Judged("duplicated", f"{answer.repeated} tokens came again")
    if answer.skipped:
        return Judged("wrong", f"{answer.skipped} tokens are missing before an event")
    if answer.changed:
        return Judged("wrong", f"{answer.changed} pieces were others when they came again")
    for position, (want, got) in enumerate(zip(expected, answer.tokens, strict=False)):
        if want != got:
            return Judged("wrong", f"token {position} is {got}, not {want}")
    if len(answer.tokens) > len(expected):
        return Judged("duplicated", f"{len(answer.tokens)} tokens, {len(expected)} were asked for")
    if len(answer.tokens) < len(expected):
        return Judged("wrong", f"{len(answer.tokens)} tokens, {len(expected)} were asked for")
    return None

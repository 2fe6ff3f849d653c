"""Sessions of a language model and the face of an agent that serves them, for `bench neustream`.

`neustream_language` drives agents: `neustream_prefill_first` and `neustream_agents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from keystage.batching.api import Request

BLOCK_TOKENS = 16


class Session(Request):
    """A request at one agent.

    Attributes:
        came_s: when it came to this agent.
        prompt: tokens to be prefilled the first time.
        output: tokens it will generate, not known beforehand.
        made: tokens it has generated.
        tokens: of its KV state in its next step, or of its next prefill.
        first_s: when the first token was there.
        ended_s: when the last was; infinite where it was given up.
        due_first_s: objective of the first token.
        due_last_s: objective of the last one.
        token_scale: by how much each further token may take longer than alone.
    """

    __slots__ = (
        "came_s",
        "due_first_s",
        "due_last_s",
        "ended_s",
        "first_s",
        "made",
        "output",
        "prompt",
        "token_scale",
        "tokens",
    )

    def __init__(self, number: int, came_s: float, prompt: int, output: int) -> None:
        super().__init__(number, 0, came_s, float("inf"))
        self.came_s = came_s
        self.prompt = prompt
        self.output = output
        self.made = 0
        self.tokens = prompt
        self.first_s = self.ended_s = float("inf")
        self.due_first_s = self.due_last_s = float("inf")
        self.token_scale = 1.0

    @property
    def blocks(self) -> int:
        """KV blocks that these take."""
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def is_good(self) -> bool:
        """Whether its last token was in time: the goodput of the decode module."""
        return self.ended_s <= self.due_last_s + 1e-9

    @property
    def is_prompt(self) -> bool:
        """Whether its first token was."""
        return self.first_s <= self.due_first_s + 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A batch that could start.

    Attributes:
        module: of the agent: 0, or 1 for decode where that is a module of its own.
        sessions: who is in it.
        whole_s: seconds on the whole device.
        is_prefill: whether it computes prompts.
    """

    module: int
    sessions: list[Session]
    whole_s: float
    is_prefill: bool


class Agent(Protocol):
    """One model with its sessions."""

    modules: int

    def enter(self, session: Session, now_s: float) -> None:
        """A request comes."""

    def offer(self, module: int, now_s: float) -> Offer | None:
        """The next batch of a module that does nothing; called whenever something has changed."""

    def done(self, offer: Offer, now_s: float) -> list[Session]:
        """A batch has ended. Returns the sessions that have ended with it."""

    def given_up(self) -> list[Session]:
        """Sessions refused since the last call."""


def advance(sessions: Sequence[Session], now_s: float) -> list[Session]:
    """Every session gets a token; returns those that have all of theirs."""
    ended = []
    for session in sessions:
        made = session.made = session.made + 1
        session.tokens += 1
        if made == 1:
            session.first_s = now_s
        if made >= session.output:
            session.ended_s = now_s
            ended.append(session)
    return ended

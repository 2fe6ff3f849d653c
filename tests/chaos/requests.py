"""What is asked, and what must be answered. Pure: the same seed gives the same requests.

Before it: `model` made `Case`s, each with its right answer. After it: `client` sends a `Request`, `checker`
holds what came against it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

STREAMED_RATIO = 0.7
HURRIED_RATIO = 0.02
"""With a deadline that a fault may break."""
DEADLINE_S = 120.0
"""Enough for any fault of the schedule, and for several one after the other."""
HURRIED_S = (2.0, 6.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its answer.

    Attributes:
        prompt: token ids.
        max_tokens: new tokens, all of which are made (no end token ends it).
        temperature: 0 is greedy.
        top_p: nucleus mass.
        seed: of the draws.
        expected: the new tokens.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    expected: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of the load.

    Attributes:
        number: from 0.
        key: its `Idempotency-Key`.
        case: what is asked.
        is_streamed: as events, or one answer.
        deadline_s: seconds it may take, told to the router.
    """

    number: int
    key: str
    case: Case
    is_streamed: bool
    deadline_s: float

    def body(self, model: str) -> dict[str, Any]:
        """The body of `/v1/completions`."""
        case = self.case
        fields: dict[str, Any] = {
            "model": model,
            "prompt": list(case.prompt),
            "max_tokens": case.max_tokens,
            "temperature": case.temperature,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if case.temperature > 0:
            fields |= {"top_p": case.top_p, "seed": case.seed}
        if self.is_streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields


def shape(rng: random.Random, context: int, vocabulary: int) -> Case:
    """Draws a case without its answer: mostly short, one in ten a long answer, two in three sampled."""
    most = context - 8
    new = rng.randint(most // 4, most // 2) if rng.random() < 0.1 else rng.randint(1, most // 8)
    length = min(most - new, rng.choice((rng.randint(1, 8), rng.randint(8, 48), rng.randint(48, 160))))
    is_greedy = rng.random() < 1 / 3
    return Case(
        prompt=tuple(rng.randrange(3, vocabulary) for _ in range(length)),
        max_tokens=new,
        temperature=0.0 if is_greedy else rng.choice((0.7, 1.0)),
        top_p=1.0 if is_greedy else rng.choice((0.9, 1.0)),
        seed=0 if is_greedy else rng.getrandbits(63),
        expected=(),
    )


def drawn(seed: int, run: str, number: int, cases: Sequence[Case]) -> Request:
    """The request of a number.

    Args:
        seed: of the run.
        run: what no other run's keys begin with.
        number: of the request.
        cases: to choose from.
    """
    rng = random.Random(f"{seed} request {number}")
    case = rng.choice(cases)
    is_streamed = rng.random() < STREAMED_RATIO
    is_hurried = rng.random() < HURRIED_RATIO
    deadline_s = round(rng.uniform(*HURRIED_S), 1) if is_hurried else DEADLINE_S
    return Request(number, f"{run}-{number}", case, is_streamed, deadline_s)

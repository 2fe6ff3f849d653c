"""Completion requests of `keystage bench engine`: token ids in, token ids and times out, over real HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from keystage.bench.frame import BenchError

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion.

    Attributes:
        ids: tokens.
        first_s: seconds from the request to the first token.
        total_s: seconds from the request to the last token.
        times_s: when each event came, by `time.perf_counter`, and how many tokens there were then.
    """

    ids: list[int]
    first_s: float
    total_s: float
    times_s: list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Together:
    """Completions that were asked for at once.

    Attributes:
        answers: one per prompt, in order.
        seconds: from the first request to the last token of all.
    """

    answers: list[Answer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all over the time of all."""
        return sum(len(answer.ids) for answer in self.answers) / self.seconds


def steady_tokens_per_s(answers: Sequence[Answer]) -> float:
    """Tokens a second while all of them decode: from the last first token to the first last one.

    Args:
        answers: of requests that were sent together.

    Raises:
        BenchError: they never decoded all at once.
    """
    begin_s, end_s = _steady(answers)
    tokens = sum(_count_at(answer, end_s) - _count_at(answer, begin_s) for answer in answers)
    return tokens / (end_s - begin_s)


def steady_window(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when to when all of them decoded, in Unix seconds.

    Raises:
        BenchError: they never decoded all at once.
    """
    begin_s, end_s = _steady(answers)
    offset_s = time.time() - time.perf_counter()
    return begin_s + offset_s, end_s + offset_s


def _steady(answers: Sequence[Answer]) -> tuple[float, float]:
    begin_s = max(answer.times_s[0][0] for answer in answers)
    end_s = min(answer.times_s[-1][0] for answer in answers)
    if end_s <= begin_s:
        raise BenchError("the requests never decoded all at once: more tokens are needed")
    return begin_s, end_s


def _count_at(answer: Answer, at_s: float) -> int:
    return max((count for when_s, count in answer.times_s if when_s <= at_s), default=0)


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


async def complete(
    session: aiohttp.ClientSession, url: str, prompts: Sequence[Sequence[int]], tokens: int
) -> Together:
    """Sends one request per prompt at the same time and reads all answers to their ends.

    Args:
        session: an open one.
        url: address of the router, or of the gateway's function.
        prompts: token ids.
        tokens: new tokens each, exactly.

    Raises:
        BenchError: an answer is none, or has another number of tokens.
    """
    begin_s = time.perf_counter()
    answers = await asyncio.gather(*(_one(session, url, prompt, tokens) for prompt in prompts))
    return Together(list(answers), time.perf_counter() - begin_s)


async def _one(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int) -> Answer:
    body = {
        "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    begin_s = time.perf_counter()
    first_s = 0.0
    ids: list[int] = []
    times_s: list[tuple[float, int]] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:], type=_Event)
            if event.error is not None:
                raise BenchError(f"{url} failed after {len(ids)} tokens: {event.error.get('message', '')}")
            for choice in event.choices:
                ids += choice.token_ids
            times_s.append((time.perf_counter(), len(ids)))
            first_s = first_s or (time.perf_counter() - begin_s if ids else 0.0)
    if len(ids) != tokens:
        raise BenchError(f"{url} answered with {len(ids)} tokens instead of {tokens}")
    return Answer(ids, first_s, time.perf_counter() - begin_s, times_s)

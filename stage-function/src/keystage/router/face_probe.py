"""An engine without workers: what is left is the HTTP face alone.

It stands at the port of `router.engine` where the core usually stands, gives tokens that depend
on (seed, position) only, and counts what is open. Tests drive the face with it, and benchmarks
take the face's own share of a request's time with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from keystage.router.engine import NOBODY, Caller, Enough, Generation, Limits, Refusal

_MIX = 0x9E3779B97F4A7C15
_WORD = 2**64


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """Token of a session at a position: a multiplicative hash (splitmix64's mixing step)."""
    z = (seed + (position + 1) * _MIX) % _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _WORD
    return (z ^ (z >> 31)) % vocab_size


class HashEngine:
    """Generates without a model.

    Attributes:
        limits: what it says it admits.
        open: sessions that run now.
        begun: sessions that ever ran.
        closed_early: sessions closed by the face before their end.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        delay_s: float = 0.0,
        together: int = 1,
        answer: Callable[[Generation], Sequence[int]] | None = None,
        refuse: Callable[[int], Refusal | None] = lambda _position: None,
    ) -> None:
        """Stores what it is to do.

        Args:
            limits: what it says it admits.
            delay_s: time before each group of tokens; 0 only gives way to other tasks.
            together: tokens per group.
            answer: the tokens of a request, instead of hashed ones.
            refuse: refusal before the token of that position (0: not admitted).
        """
        self._limits = limits
        self._delay_s = delay_s
        self._together = together
        self._answer = answer
        self._refuse = refuse
        self.open = 0
        self.begun = 0
        self.closed_early = 0

    @property
    def limits(self) -> Limits:
        """See `Engine`."""
        return self._limits

    async def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine`."""
        ids = self._tokens(request)
        with self._session():
            for start in range(len(request.resumed), len(ids), self._together):
                await asyncio.sleep(self._delay_s)
                if (refusal := self._refuse(start)) is not None:
                    raise refusal
                group = list(ids[start : start + self._together])
                yield group

    async def run(
        self,
        payload: bytes,
        deadline_s: float | None = None,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        caller: Caller = NOBODY,
    ) -> bytes:
        """See `Engine`; the output is the input reversed."""
        with self._session():
            await asyncio.sleep(self._delay_s)
            if (refusal := self._refuse(0)) is not None:
                raise refusal
            return payload[::-1]

    def _tokens(self, request: Generation) -> Sequence[int]:
        if self._answer is not None:
            return self._answer(request)[: request.max_tokens]
        ids: list[int] = []
        for position in range(request.max_tokens):
            ids.append(token_at(request.seed, position, self._limits.vocab_size))
            if ids[-1] in request.eos:
                break
        return ids

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        self.open += 1
        self.begun += 1
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError, Enough):
            self.closed_early += 1
            raise
        finally:
            self.open -= 1

"""An engine without workers for single-pass faces: it answers items by a function and counts what is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from keystage.bundle.api import Pipeline, emulated
from keystage.router.engine import NOBODY, Caller, Generation, InvalidRequest, Limits, Refusal

WIDTH = 6
CONTEXT = 32
VOCABULARY = 300


def pipeline_for(family: str, name: str = "items", **config: Any) -> Pipeline:
    """A single-pass pipeline of a family, without parameters."""
    import msgspec

    return msgspec.structs.replace(
        emulated(name, 2, execution="single-pass"),
        family=family,
        config=config,
        context_length=CONTEXT if family == "bert" else 0,
        hidden_size=WIDTH,
        vocab_size=config.get("num_classes", VOCABULARY),
    )


def limits_for(pipeline: Pipeline, max_body_bytes: int = 100_000) -> Limits:
    """What its engine admits."""
    return Limits(False, pipeline.context_length, pipeline.vocab_size, max_body_bytes)


def vector_of(ids: list[int]) -> list[float]:
    """The "embedding" of token ids: short fractions, exact in float32."""
    return [len(ids), ids[0], ids[-1], sum(ids) / 4, 0.5, -0.25]


def embed(payload: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Answers `vector_of` the item."""
    assert (dtype, len(shape)) == ("int64", 1)
    ids = np.frombuffer(payload, "<i8")
    assert len(ids) == shape[0]
    return np.array(vector_of(ids.tolist()), "<f4").tobytes()


class ItemEngine:
    """Answers every item.

    Attributes:
        limits: what it says it admits.
        open: items that run now.
        most_open: as many as ever ran at once.
        begun: items that ever ran.
        hold: while it is set nothing is answered.
    """

    def __init__(
        self,
        limits: Limits,
        answer: Callable[[bytes, str, tuple[int, ...]], bytes] = embed,
        refuse: Callable[[bytes], Refusal | None] = lambda _payload: None,
    ) -> None:
        self._limits = limits
        self._answer = answer
        self._refuse = refuse
        self.open = 0
        self.most_open = 0
        self.begun = 0
        self.hold = False

    @property
    def limits(self) -> Limits:
        """See `Engine`."""
        return self._limits

    async def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """See `Engine`."""
        raise InvalidRequest("single-pass")
        yield []

    async def run(
        self,
        payload: bytes,
        deadline_s: float | None = None,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        caller: Caller = NOBODY,
    ) -> bytes:
        """See `Engine`."""
        self.open += 1
        self.begun += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if (refusal := self._refuse(payload)) is not None:
                raise refusal
            await asyncio.sleep(0)
            while self.hold:
                await asyncio.sleep(0.005)
            return self._answer(payload, dtype, (len(payload),) if shape is None else shape)
        finally:
            self.open -= 1

"""Items of a single-pass pipeline as the face makes them: token ids of texts, several of them at once.

Between the readers of request bodies and the engine. Token ids are checked here against what the pipeline
takes, so that no batch fails for one bad item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from keystage.bundle.api import Pipeline
from keystage.router.engine import Caller, Engine
from keystage.router.openai import THREAD_CHARACTERS
from keystage.router.openai_errors import ContextExceeded, FieldRefused
from keystage.router.text import TextCodec

AT_ONCE = 256
"""Items of one request that wait or run at a time: a request of thousands leaves others their places."""

T = TypeVar("T")


async def token_ids(
    text: TextCodec, pipeline: Pipeline, inputs: Sequence[str | list[int]], param: str
) -> list[list[int]]:
    """Token ids of texts, framed as the tokenizer frames one, and of what is given as ids already.

    Args:
        text: the pipeline's tokenizer.
        pipeline: what is served.
        inputs: texts or ids.
        param: field they came in.

    Raises:
        FieldRefused: an id outside the vocabulary, or a text without tokens.
        ContextExceeded: an input is too long.
    """
    texts = [given for given in inputs if isinstance(given, str)]
    if sum(map(len, texts)) > THREAD_CHARACTERS:
        encoded = iter(await asyncio.to_thread(lambda: [text.encode_whole(given) for given in texts]))
    else:
        encoded = iter([text.encode_whole(given) for given in texts])
    items = [next(encoded) if isinstance(given, str) else given for given in inputs]
    for index, ids in enumerate(items):
        _check(ids, pipeline, param if len(items) == 1 else f"{param}[{index}]", param)
    return items


def _check(ids: Sequence[int], pipeline: Pipeline, path: str, param: str) -> None:
    bound, context = pipeline.vocab_size, pipeline.context_length
    if not ids:
        raise FieldRefused("invalid_value", f"{path} holds no token", param=param)
    if len(ids) > context:
        raise ContextExceeded(
            f"{path} has {len(ids)} tokens, which exceeds the context length of {context} tokens", param=param
        )
    if min(ids) < 0 or max(ids) >= bound:
        bad = next(token for token in ids if not 0 <= token < bound)
        raise FieldRefused(
            "invalid_value", f"{path}: token ids are within [0, {bound - 1}], not {bad}", param=param
        )


async def run_ids(engine: Engine, ids: Sequence[int], deadline_s: float | None, caller: Caller) -> bytes:
    """Sends token ids as one item; see `Engine.run`."""
    payload = np.asarray(ids, dtype="<i8").tobytes()
    return await engine.run(payload, deadline_s, "int64", (len(ids),), caller)


async def together(run: Callable[[T], Awaitable[bytes]], items: Sequence[T]) -> list[bytes]:
    """Runs every item, a bounded number at a time; the first that fails ends the others.

    Raises:
        Refusal: as `run` does.
    """
    if len(items) == 1:
        return [await run(items[0])]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> bytes:
        async with places:
            return await run(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

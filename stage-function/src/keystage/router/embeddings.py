"""`POST /v1/embeddings`: texts in, vectors out, as OpenAI's API has it.

Before it: `router.face` has routed the request. Every input is an item of its own of the single-pass
pipeline, so that inputs of several requests share batches; the answer has them in order. The plain
function call of such a pipeline is the same call.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from keystage.bundle.api import Pipeline
from keystage.router import fields
from keystage.router.api_keys import caller_of
from keystage.router.engine import Engine, Failure, InvalidRequest
from keystage.router.face_http import Receive, Scope, Send, deadline_s, read_body, send_whole, watched
from keystage.router.items import run_ids, together, token_ids
from keystage.router.openai import check_model, read_object
from keystage.router.openai_errors import FieldRefused
from keystage.router.tasks import Task, task_of
from keystage.router.text import TextCodec

PATH = "/v1/embeddings"
THREAD_NUMBERS = 50_000
"""Longer answers are written in a thread: so many numbers take about 5 ms of the event loop."""


class Embeddings:
    """Serves the path for one pipeline.

    Args:
        engine: runs items.
        pipeline: what is served; every request is refused if it makes no embeddings.
        text: its tokenizer.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline, text: TextCodec) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._text = text

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Raises:
            Refusal: names the field, the bound and the actual value.
        """
        body = await read_body(scope, receive, self._engine.limits.max_body_bytes)
        pipeline = self._pipeline
        if task_of(pipeline) is not Task.EMBED:
            raise InvalidRequest(f"pipeline {pipeline.name!r} makes no embeddings")
        values = fields.read_fields(fields.EMBEDDINGS, read_object(body))
        check_model(pipeline, values.get("model"))
        if "input" not in values:
            raise FieldRefused("missing_parameter", "input is missing", param="input")
        wanted = values.get("dimensions", pipeline.hidden_size)
        if wanted != pipeline.hidden_size:
            raise FieldRefused(
                "unsupported_value",
                f"dimensions is served only as {pipeline.hidden_size}, the model's own, not {wanted}",
                param="dimensions",
            )
        limit_s, caller = deadline_s(scope), caller_of(scope)
        with watched(receive):
            items = await token_ids(self._text, pipeline, values["input"], "input")
            vectors = await together(lambda ids: run_ids(self._engine, ids, limit_s, caller), items)
        answer = (vectors, sum(map(len, items)), values.get("encoding_format") == "base64")
        if len(vectors) * pipeline.hidden_size > THREAD_NUMBERS:
            await send_whole(send, await asyncio.to_thread(self._rendered, *answer))
        else:
            await send_whole(send, self._rendered(*answer))

    def _rendered(self, vectors: Sequence[bytes], tokens: int, is_base64: bool) -> bytes:
        expected = 4 * self._pipeline.hidden_size
        data: list[dict[str, Any]] = []
        for index, vector in enumerate(vectors):
            if len(vector) != expected:
                raise Failure(f"an embedding of {len(vector)} bytes, {expected} are expected")
            shown: Any = np.frombuffer(vector, "<f4").tolist()
            if is_base64:
                shown = base64.b64encode(vector).decode()
            data.append({"object": "embedding", "index": index, "embedding": shown})
        return msgspec.json.encode(
            {
                "object": "list",
                "data": data,
                "model": self._pipeline.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

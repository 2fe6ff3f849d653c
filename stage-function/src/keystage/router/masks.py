"""The plain call of a fill-mask pipeline: a text with masks in, the likeliest tokens for each out.

Before it: `router.face` has routed the request. The item is two rows of numbers, ids and marks; the last
stage names tokens at the marked places only and knows no texts (`models.bert`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keystage.bundle.api import Pipeline
from keystage.router import fields
from keystage.router.api_keys import caller_of
from keystage.router.engine import Engine, Failure, InvalidRequest
from keystage.router.face_http import Receive, Scope, Send, deadline_s, read_body, send_whole, watched
from keystage.router.items import token_ids
from keystage.router.openai import check_model, read_object
from keystage.router.openai_errors import FieldRefused
from keystage.router.text import TextCodec, decode

DEFAULT_TOP_K = 5
MOST_MASKS = 64
"""Masks of one text."""


class MaskFilling:
    """Serves the plain call of one pipeline.

    Args:
        engine: runs items.
        pipeline: what is served.
        text: its tokenizer.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline, text: TextCodec) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._text = text
        mask = pipeline.special_tokens.get("mask_token", "")
        self._mask_id = text.token_id(mask) if mask else None
        self._mask = mask

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Raises:
            Refusal: names the field, the bound and the actual value.
        """
        body = await read_body(scope, receive, self._engine.limits.max_body_bytes)
        values = fields.read_fields(fields.FILL_MASK, read_object(body))
        check_model(self._pipeline, values.get("model"))
        if "text" not in values:
            raise FieldRefused("missing_parameter", "text is missing", param="text")
        if self._mask_id is None:
            raise InvalidRequest(f"pipeline {self._pipeline.name!r} has no tokenizer with a mask")
        limit_s, caller = deadline_s(scope), caller_of(scope)
        with watched(receive):
            ids = (await token_ids(self._text, self._pipeline, [values["text"]], "text"))[0]
            marks = [int(token == self._mask_id) for token in ids]
            if not 1 <= sum(marks) <= MOST_MASKS:
                raise FieldRefused(
                    "invalid_value",
                    f"text must hold 1 to {MOST_MASKS} times {self._mask}, not {sum(marks)}",
                    param="text",
                )
            payload = np.array([ids, marks], dtype="<i8").tobytes()
            found = await self._engine.run(payload, limit_s, "int64", (2, len(ids)), caller)
        top_k = values.get("top_k", DEFAULT_TOP_K)
        await send_whole(send, self._rendered(found, sum(marks), top_k, len(ids)))

    def _rendered(self, found: bytes, masks: int, top_k: int, tokens: int) -> bytes:
        if not found or len(found) % (8 * masks):
            raise Failure(f"an answer of {len(found)} bytes for {masks} masks")
        places = np.frombuffer(found, "<f4").reshape(masks, 2, -1)
        shown: list[list[dict[str, Any]]] = []
        for log_probabilities, named in places:
            scores = np.exp(log_probabilities[:top_k].astype(np.float64))
            shown.append(
                [
                    {"token": int(token), "text": decode(self._text, [int(token)]), "score": float(score)}
                    for token, score in zip(named[:top_k], scores, strict=True)
                ]
            )
        return msgspec.json.encode({"model": self._pipeline.name, "masks": shown, "prompt_tokens": tokens})

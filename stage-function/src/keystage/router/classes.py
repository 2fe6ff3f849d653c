"""The plain call of an image pipeline: an image in, its likeliest classes out.

Before it: `router.face` has routed the request. `router.images` makes the body an item; the last stage's
logits become scores here, or leave as they are for a client that accepts safetensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import SplitError
from keystage.bundle.safetensors_file import header_bytes
from keystage.models import wide_resnet_config
from keystage.models.config_fields import shown
from keystage.router import images
from keystage.router.api_keys import caller_of
from keystage.router.engine import Engine, Failure
from keystage.router.face_http import (
    Receive,
    Scope,
    Send,
    deadline_s,
    header,
    read_body,
    send_whole,
    watched,
)
from keystage.router.openai_errors import FieldRefused

DEFAULT_TOP_K = 5
MOST_CLASSES = 1_000_000
SAFETENSORS = "application/x-safetensors"


class Classifying:
    """Serves the plain call of one pipeline.

    Args:
        engine: runs items.
        pipeline: what is served, a network of `models.wide_resnet`.

    Raises:
        SplitError: the pipeline's config is no such network's.
    """

    def __init__(self, engine: Engine, pipeline: Pipeline) -> None:
        self._engine = engine
        self._name = pipeline.name
        self._config = wide_resnet_config.parse(pipeline.config)
        labels = pipeline.config.get("id2label") or {}
        if not isinstance(labels, Mapping) or self._config.classes > MOST_CLASSES:
            raise SplitError(
                f"config.json: id2label must be an object and num_classes at most {MOST_CLASSES}, "
                f"got {shown(labels)} and {self._config.classes}"
            )
        self._labels = [str(labels.get(str(index), index)) for index in range(self._config.classes)]

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Raises:
            Refusal: names what is at fault, the bound and the actual value.
        """
        top_k = self._top_k(scope)
        body = await read_body(scope, receive, self._engine.limits.max_body_bytes)
        limit_s, caller = deadline_s(scope), caller_of(scope)
        with watched(receive):
            if images.is_file(body):
                picture = await asyncio.to_thread(images.read, body, self._config)
            else:
                picture = images.read(body, self._config)
            logits = await self._engine.run(picture.data, limit_s, picture.dtype, picture.shape, caller)
        if len(logits) != 4 * self._config.classes:
            raise Failure(f"an answer of {len(logits)} bytes for {self._config.classes} classes")
        if SAFETENSORS.encode() in (header(scope, b"accept") or b""):
            head = header_bytes({"logits": (self._config.classes,)}, "float32")
            await send_whole(send, head + logits, SAFETENSORS.encode())
            return
        await send_whole(send, self._rendered(np.frombuffer(logits, "<f4"), top_k))

    def _top_k(self, scope: Scope) -> int:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("top_k")
        if given is None:
            return min(DEFAULT_TOP_K, self._config.classes)
        most = self._config.classes
        if len(given) == 1 and given[0].isascii() and given[0].isdigit() and 1 <= int(given[0][:9]) <= most:
            return int(given[0][:9])
        raise FieldRefused(
            "invalid_value", f"top_k must be within [1, {most}], not {given[0][:20]!r}", param="top_k"
        )

    def _rendered(self, logits: np.ndarray[Any, np.dtype[np.float32]], top_k: int) -> bytes:
        wide = logits.astype(np.float64)
        scores = np.exp(wide - wide.max())
        scores /= scores.sum()
        likeliest = np.argsort(-scores, kind="stable")[:top_k]
        classes = [
            {"class": int(index), "label": self._labels[index], "score": float(scores[index])}
            for index in likeliest
        ]
        return msgspec.json.encode({"model": self._name, "classes": classes})

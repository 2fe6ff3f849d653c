"""Reads a request body into a `Call`: the engine's `Generation` and how its answer is to look.

Before it: `router.face` has the path and the whole body. After it: the engine generates and
`router.openai_render` writes the answer. Three dialects share it: the plain function call,
OpenAI's completions and OpenAI's chat completions; `router.fields` says which field means what.

No IO but the tokenizer, and that in a thread for long texts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from keystage.bundle.api import Pipeline
from keystage.router import fields
from keystage.router.engine import Generation, InvalidRequest, Limits
from keystage.router.openai_chat import read_messages
from keystage.router.openai_errors import ContextExceeded, FieldRefused, Malformed, UnknownModel
from keystage.router.text import TextCodec, decode
from keystage.router.text_chat import ChatTemplate
from keystage.wire.unreadable import UNREADABLE

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions; the plain call shares it."""
THREAD_CHARACTERS = 20_000
"""Longer texts are tokenised in a thread: 20,000 characters take about 5 ms of the event loop."""

_decode = msgspec.json.Decoder().decode


class Dialect(enum.Enum):
    """Which API the request came by."""

    PLAIN = "plain"
    COMPLETION = "completion"
    CHAT = "chat"


_TABLES = {Dialect.PLAIN: fields.PLAIN, Dialect.COMPLETION: fields.COMPLETION, Dialect.CHAT: fields.CHAT}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One validated request.

    Attributes:
        dialect: API it came by.
        generation: what the engine is to do.
        stops: stop strings.
        stream: whether the answer goes out in chunks.
        include_usage: whether a stream ends with the usage.
        echo: text that goes before the answer (the prompt), empty for none.
        token_ids: whether token ids go out beside the text.
        is_repeatable: whether the same request gives the same answer: it is greedy or brought its seed.
    """

    dialect: Dialect
    generation: Generation
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    echo: str
    token_ids: bool
    is_repeatable: bool = False


class CallReader:
    """Reads bodies for one pipeline.

    Attributes:
        limits: what the engine admits.
    """

    def __init__(self, pipeline: Pipeline, limits: Limits, text: TextCodec) -> None:
        self.limits = limits
        self._pipeline = pipeline
        self._text = text
        self._template = (
            ChatTemplate(pipeline.chat_template, pipeline.special_tokens) if pipeline.chat_template else None
        )

    async def read(self, dialect: Dialect, body: bytes, deadline_s: float | None) -> Call:
        """Validates and tokenises a request.

        Args:
            dialect: API it came by.
            body: the HTTP body.
            deadline_s: seconds it may take, None for the pipeline's default.

        Raises:
            Refusal: names the field, the bound and the actual value.
        """
        values = fields.read_fields(_TABLES[dialect], read_object(body))
        check_model(self._pipeline, values.get("model"))
        if "stream_options" in values and not values.get("stream"):
            raise FieldRefused(
                "invalid_value", "stream_options is served only with stream true", param="stream_options"
            )
        source = "messages" if dialect is Dialect.CHAT else "prompt"
        if source not in values:
            raise FieldRefused("missing_parameter", f"{source} is missing", param=source)
        given = values[source]
        prompt = await (self._chat_prompt(given) if dialect is Dialect.CHAT else self._prompt(given))
        generation = Generation(
            prompt=prompt,
            max_tokens=self._max_tokens(dialect, values, len(prompt), source),
            temperature=values.get("temperature", 0.0 if dialect is Dialect.PLAIN else 1.0),
            top_p=values.get("top_p", 1.0),
            seed=values["seed"] if "seed" in values else random.getrandbits(64),
            eos=() if values.get("ignore_eos") else tuple(self._pipeline.eos),
            deadline_s=deadline_s,
        )
        return Call(
            dialect=dialect,
            generation=generation,
            stops=values.get("stop", ()),
            stream=values.get("stream", False),
            include_usage=values.get("stream_options", False),
            echo=self._echo(given) if values.get("echo") else "",
            token_ids=values.get("return_token_ids", False),
            is_repeatable="seed" in values or generation.temperature == 0,
        )

    async def _encode(self, text: str) -> list[int]:
        if len(text) > THREAD_CHARACTERS:
            return await asyncio.to_thread(self._text.encode, text)
        return self._text.encode(text)

    async def _chat_prompt(self, messages: object) -> list[int]:
        if self._template is None:
            raise InvalidRequest(f"pipeline {self._pipeline.name!r} has no chat template", param="messages")
        ids = await self._encode(self._template.render(read_messages(messages)))
        if not ids:
            raise InvalidRequest("the chat template makes an empty prompt of the messages", param="messages")
        return ids

    async def _prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = await self._encode(prompt)
            bos = self._pipeline.bos
            if bos is not None and ids[:1] != [bos]:
                ids.insert(0, bos)
        else:
            ids = prompt
            self._check_ids(ids)
        if not ids:
            raise FieldRefused(
                "invalid_value", "prompt is empty and the pipeline has no token to begin with", param="prompt"
            )
        return ids

    def _check_ids(self, ids: list[int]) -> None:
        bound = self.limits.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= bound):
            bad = next(i for i in ids if not 0 <= i < bound)
            raise FieldRefused(
                "invalid_value", f"prompt: token ids are within [0, {bound - 1}], not {bad}", param="prompt"
            )

    def _max_tokens(self, dialect: Dialect, values: Mapping[str, Any], prompt: int, source: str) -> int:
        """New tokens allowed: what was asked for if it fits, else the default within the context."""
        context = self.limits.context_length
        room = context - prompt
        if room < 1:
            raise ContextExceeded(
                f"{source} has {prompt} tokens; with at least 1 new token that exceeds the context "
                f"length of {context} tokens",
                param=source,
            )
        older, newer = values.get("max_tokens"), values.get("max_completion_tokens")
        if older is not None and newer is not None and older != newer:
            raise FieldRefused(
                "invalid_value",
                f"max_tokens {older} and max_completion_tokens {newer} differ; give one",
                param="max_completion_tokens",
            )
        asked = newer if newer is not None else older
        if asked is None:
            return room if dialect is Dialect.CHAT else min(DEFAULT_MAX_TOKENS, room)
        if asked > room:
            name = "max_completion_tokens" if newer is not None else "max_tokens"
            raise ContextExceeded(
                f"{source} of {prompt} tokens and {name} {asked} make {prompt + asked}, above the context "
                f"length of {context} tokens",
                param=name,
            )
        return int(asked)

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else decode(self._text, prompt)


def check_model(pipeline: Pipeline, model: str | None) -> None:
    """Refuses a request for another model; None asks for whichever is served.

    Raises:
        UnknownModel: names both.
    """
    if model is not None and model != pipeline.name:
        raise UnknownModel(f"model {model!r} is not served here; this is {pipeline.name!r}", param="model")


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
        Malformed: it is none.
    """
    try:
        value = _decode(body)
    except UNREADABLE as error:
        raise Malformed(f"the body of {len(body)} bytes is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Malformed(f"the body must be a JSON object, not {type(value).__name__}")
    return value

"""Which request fields are honoured, accepted without effect, accepted when neutral, or refused.

One table per path; `docs/api.md` shows the same tables and a test compares the two, and
`router.openapi` makes its request schemas of them. Every field
of OpenAI's API that is known when this is written stands here; what does not is refused as
unknown. Null means absent, as in OpenAI's API.

Before it: the decoded body. After it: `router.openai` turns the values into a generation.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from keystage.models.bert_config import TOP_TOKENS
from keystage.router import openai_chat
from keystage.router import openai_values as values
from keystage.router.openai_errors import FieldRefused

_MOST_TOKENS = 2**31 - 1


class Verdict(enum.StrEnum):
    """What happens to a field."""

    HONOURED = "honoured"
    NO_EFFECT = "accepted, no effect"
    NEUTRAL = "accepted when neutral"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        verdict: what happens to it.
        read: reader of its value.
        note: bounds, defaults or the neutral values, for the documentation.
    """

    verdict: Verdict
    read: values.Reader
    note: str = ""


def _honoured(read: values.Reader, note: str) -> Field:
    return Field(Verdict.HONOURED, read, note)


def _neutral(*accepted: object) -> Field:
    spelled = ", ".join(values.shown(value) for value in accepted)
    return Field(Verdict.NEUTRAL, values.neutral(*accepted), spelled)


_NO_EFFECT = Field(Verdict.NO_EFFECT, values.ignored, "a label; nothing depends on it")
_REFUSED = Field(Verdict.REFUSED, values.refused)

_COMMON = {
    "model": _honoured(values.text, "the pipeline's name"),
    "max_tokens": _honoured(values.integer(1, _MOST_TOKENS), "1 or more; must fit the context"),
    "temperature": _honoured(values.real(0, 2), "0 (greedy) to 2; default 1"),
    "top_p": _honoured(values.real(0, 1, above_low=True), "above 0, up to 1; default 1"),
    "stop": _honoured(values.stops, "a string or up to 4, of 1 to 256 characters"),
    "seed": _honoured(values.seed, "any 64-bit number; drawn if absent"),
    "stream": _honoured(values.flag, "server-sent events"),
    "ignore_eos": _honoured(values.flag, "Keystage's own: end tokens do not end the answer"),
    "return_token_ids": _honoured(values.flag, "Keystage's own: adds `token_ids` to the answer"),
}

PLAIN: Mapping[str, Field] = {
    **_COMMON,
    "prompt": _honoured(values.prompt, "a string or a list of token ids, or a list of one of these"),
    "temperature": _honoured(values.real(0, 2), "0 (greedy) to 2; default 0"),
}

_OPENAI = {
    **_COMMON,
    "stream_options": _honoured(values.stream_options, "`include_usage`; only with `stream`"),
    "user": _NO_EFFECT,
    "n": _neutral(1),
    "frequency_penalty": _neutral(0),
    "presence_penalty": _neutral(0),
    "logit_bias": _neutral({}),
}

COMPLETION: Mapping[str, Field] = {
    **_OPENAI,
    "prompt": _honoured(values.prompt, "a string or a list of token ids, or a list of one of these"),
    "max_tokens": _honoured(values.integer(1, _MOST_TOKENS), "1 or more; must fit the context; default 16"),
    "echo": _honoured(values.flag, "puts the prompt before the answer"),
    "best_of": _neutral(1),
    "logprobs": _neutral(False),
    "suffix": _neutral(""),
}

CHAT: Mapping[str, Field] = {
    **_OPENAI,
    "messages": _honoured(openai_chat.UNREAD, "system, developer, user, assistant; text content"),
    "max_tokens": _honoured(values.integer(1, _MOST_TOKENS), "older name of `max_completion_tokens`"),
    "max_completion_tokens": _honoured(
        values.integer(1, _MOST_TOKENS), "1 or more; must fit the context; default: the rest of it"
    ),
    "metadata": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "prompt_cache_key": _NO_EFFECT,
    "store": _neutral(False),
    "service_tier": _neutral("auto", "default"),
    "logprobs": _neutral(False),
    "top_logprobs": _neutral(0),
    "response_format": _neutral({"type": "text"}),
    "modalities": _neutral(["text"]),
    "tools": _neutral([]),
    "tool_choice": _neutral("none", "auto"),
    "parallel_tool_calls": _neutral(True, False),
    "functions": _neutral([]),
    "function_call": _neutral("none", "auto"),
    "verbosity": _neutral("medium"),
    "reasoning_effort": _REFUSED,
    "audio": _REFUSED,
    "prediction": _REFUSED,
    "web_search_options": _REFUSED,
    "moderation": _REFUSED,
    "prompt_cache_options": _REFUSED,
    "prompt_cache_retention": _REFUSED,
}

EMBEDDINGS: Mapping[str, Field] = {
    "model": _honoured(values.text, "the pipeline's name"),
    "input": _honoured(
        values.inputs, "a string, a list of token ids, or a list of up to 2048 of one of these; none empty"
    ),
    "encoding_format": _honoured(values.choice("float", "base64"), "`float` or `base64`; default `float`"),
    "dimensions": _honoured(values.integer(1, _MOST_TOKENS), "only the model's own"),
    "user": _NO_EFFECT,
}

FILL_MASK: Mapping[str, Field] = {
    "model": _honoured(values.text, "the pipeline's name"),
    "text": _honoured(values.filled_text, "a text with 1 to 64 times the tokenizer's mask"),
    "top_k": _honoured(values.integer(1, TOP_TOKENS), "tokens for each mask; default 5"),
}


def read_fields(table: Mapping[str, Field], body: Mapping[str, Any]) -> dict[str, Any]:
    """Reads all fields of a body.

    Args:
        table: one of the tables of this module.
        body: the decoded JSON object.

    Returns:
        Values of the fields that are present and not null; those without effect are None.

    Raises:
        FieldRefused: names the first field at fault.
    """
    read: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise FieldRefused("unknown_parameter", f"unknown field {values.shown(name)}", param=name)
        if value is not None:
            read[name] = field.read(name, value)
    return read

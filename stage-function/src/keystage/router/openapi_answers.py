"""JSON Schemas of what the router answers, for its OpenAPI document.

Beside `router.openai_render` and `router.openai_errors`, which write the answers. Schemas are
closed: a member that is written but not described here fails a test. Pure.
"""

from __future__ import annotations

from typing import Any, get_args

from keystage.router import openai_errors
from keystage.router.text_output import FinishReason

Schema = dict[str, Any]

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": {"$ref": "#/components/schemas/TokenId"}}
_NULL = {"type": "null"}
_REASON: Schema = {"enum": list(get_args(FinishReason))}


def _closed(members: Schema, *optional: str) -> Schema:
    """An object with these members and no others; all but the optional ones are required."""
    return {
        "type": "object",
        "properties": members,
        "required": [name for name in members if name not in optional],
        "additionalProperties": False,
    }


_USAGE = _closed({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})


def _completion(kind: str, prefix: str, choice: Schema) -> Schema:
    own = {"index": {"const": 0}, "logprobs": _NULL, "finish_reason": _REASON, "token_ids": _IDS, **choice}
    return _closed(
        {
            **_head(kind, prefix),
            "choices": {"type": "array", "items": _closed(own, "token_ids"), "minItems": 1, "maxItems": 1},
            "usage": _USAGE,
        }
    )


def _chunk(kind: str, prefix: str, choice: Schema, *optional: str) -> Schema:
    """One event of a stream: without a choice where it tells the usage."""
    reason = {"enum": [*_REASON["enum"], None]}
    own = {"index": {"const": 0}, "logprobs": _NULL, "finish_reason": reason, **choice}
    return _closed(
        {
            **_head(kind, prefix),
            "choices": {"type": "array", "items": _closed(own, *optional), "maxItems": 1},
            "usage": {"anyOf": [_USAGE, _NULL]},
        },
        "usage",
    )


def _head(kind: str, prefix: str) -> Schema:
    return {
        "id": {"type": "string", "pattern": f"^{prefix}-[0-9a-f]{{24}}$"},
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
    }


PLAIN = _closed(
    {
        "text": _TEXT,
        "tokens": _COUNT,
        "prompt_tokens": _COUNT,
        "finish_reason": _REASON,
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        "model": _TEXT,
        "token_ids": _IDS,
    },
    "token_ids",
)
COMPLETION = _completion("text_completion", "cmpl", {"text": _TEXT})
CHAT = _completion(
    "chat.completion",
    "chatcmpl",
    {"message": _closed({"role": {"const": "assistant"}, "content": _TEXT, "refusal": _NULL})},
)
_PLAIN_CHUNK = {"anyOf": [_closed({"text": _TEXT, "token_ids": _IDS}, "token_ids"), PLAIN]}
_COMPLETION_CHUNK = _chunk("text_completion", "cmpl", {"text": _TEXT, "token_ids": _IDS}, "token_ids")
_DELTA = _closed(
    {"role": {"const": "assistant"}, "content": _TEXT, "token_ids": _IDS}, "role", "content", "token_ids"
)
_CHAT_CHUNK = _chunk("chat.completion.chunk", "chatcmpl", {"delta": _DELTA})
MODEL = _closed(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": {"const": "keystage"},
        "max_model_len": _COUNT,
    }
)
MODELS = _closed(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
    }
)


_SCORE = {"type": "number", "minimum": 0, "maximum": 1}
_INPUT_USAGE = _closed({"prompt_tokens": _COUNT, "total_tokens": _COUNT})
FILLED = _closed(
    {
        "model": _TEXT,
        "masks": {
            "type": "array",
            "items": {
                "type": "array",
                "items": _closed(
                    {"token": {"$ref": "#/components/schemas/TokenId"}, "text": _TEXT, "score": _SCORE}
                ),
            },
        },
        "prompt_tokens": _COUNT,
    }
)
CLASSES = _closed(
    {
        "model": _TEXT,
        "classes": {"type": "array", "items": _closed({"class": _COUNT, "label": _TEXT, "score": _SCORE})},
    }
)


def embeddings(width: int) -> Schema:
    """OpenAI's list of embeddings of so many numbers each."""
    numbers = {"type": "array", "items": {"type": "number"}, "minItems": width, "maxItems": width}
    encoded = {"type": "string", "contentEncoding": "base64"}
    entry = {"object": {"const": "embedding"}, "index": _COUNT, "embedding": {"anyOf": [numbers, encoded]}}
    return _closed(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": _closed(entry), "minItems": 1},
            "model": _TEXT,
            "usage": _INPUT_USAGE,
        }
    )


_SECONDS = {"type": "number", "minimum": 0}
_SOUND_USAGE = _closed({"type": {"const": "duration"}, "seconds": _COUNT})
_SEGMENT = _closed(
    {
        "id": _COUNT,
        "seek": _COUNT,
        "start": _SECONDS,
        "end": _SECONDS,
        "text": _TEXT,
        "tokens": _IDS,
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    }
)
TRANSCRIPTION = _closed({"text": _TEXT, "usage": _SOUND_USAGE})
TRANSCRIPTION_VERBOSE = _closed(
    {
        "task": {"const": "transcribe"},
        "language": _TEXT,
        "duration": _SECONDS,
        "text": _TEXT,
        "segments": {"type": "array", "items": _SEGMENT},
        "usage": _SOUND_USAGE,
    }
)


def state(word: str) -> Schema:
    """Answer of `/_/health` and `/_/ready`."""
    return _closed({word: {"type": "boolean"}})


_NUMBER = {  # a field of an event is a text
    "type": "string",
    "pattern": "^[0-9]+$",
    "description": "tokens of the answer up to here, a number; with an `Idempotency-Key` only",
}


def _event(chunk: Schema) -> Schema:
    """One server-sent event: a chunk, an error that ends the stream, or the mark of its end."""
    error = _closed({"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _TEXT})
    content = {"anyOf": [chunk, _closed({"error": error})]}
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {
        "description": "Each event of the stream.",
        "type": "object",
        "properties": {"id": _NUMBER, "data": {"anyOf": [{"const": "[DONE]"}, encoded]}},
        "required": ["data"],
    }


PLAIN_EVENT = _event(_PLAIN_CHUNK)
COMPLETION_EVENT = _event(_COMPLETION_CHUNK)
CHAT_EVENT = _event(_CHAT_CHUNK)


def refusal(status: int) -> Schema:
    """OpenAI's error object with the codes that come with a status."""
    error = {
        "message": _TEXT,
        "type": {"const": openai_errors.error_type(status)},
        "param": {"type": ["string", "null"]},
        "code": {"enum": openai_errors.codes(status)},
    }
    return _closed({"error": _closed(error)})

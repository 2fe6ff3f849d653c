"""Writes answers: whole JSON bodies and server-sent events, for each dialect.

After the engine has tokens and `text_output` has text. What stays the same from chunk to chunk
is joined once per request, so that a chunk costs one JSON string and one concatenation.
Token ids, if asked for, stand beside the text they came with.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from keystage.router.openai import Call, Dialect
from keystage.router.text_output import FinishReason

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_PREFIXES = {Dialect.COMPLETION: "cmpl", Dialect.CHAT: "chatcmpl"}
_ROLE = (
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
)


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"


def whole(call: Call, model: str, text: str, ids: Sequence[int], reason: FinishReason) -> bytes:
    """The answer in one JSON body.

    Args:
        call: the request.
        model: the pipeline's name.
        text: all of the text, without the echoed prompt.
        ids: all of the tokens.
        reason: why it ended.
    """
    if call.dialect is Dialect.PLAIN:
        summary = _summary(call, model, text, len(ids), reason)
        if call.token_ids:
            summary["token_ids"] = ids
        return _encode(summary)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if call.dialect is Dialect.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = call.echo + text
    if call.token_ids:
        choice["token_ids"] = ids
    return _encode(
        {
            "id": _identifier(call.dialect),
            "object": "chat.completion" if call.dialect is Dialect.CHAT else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(call, len(ids)),
        }
    )


class Events:
    """The answer in server-sent events: `opening`, any number of `chunk`, `closing`.

    A chunk is `before + text [+ ids] + after`; only text and ids differ from chunk to chunk.
    """

    __slots__ = ("_after", "_before", "_call", "_head", "_model", "_usage_null")

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._model = model
        self._usage_null = b',"usage":null' if call.include_usage else b""
        if call.dialect is Dialect.PLAIN:
            self._head = b"data: {"
            self._before = b'data: {"text":'
            self._after = b"}\n\n"
            return
        is_chat = call.dialect is Dialect.CHAT
        self._head = b'data: {"id":"%b","object":"%b","created":%d,"model":%b,' % (
            _identifier(call.dialect).encode(),
            b"chat.completion.chunk" if is_chat else b"text_completion",
            int(time.time()),
            _encode(model),
        )
        self._before = self._head + (
            b'"choices":[{"index":0,"delta":{"content":' if is_chat else b'"choices":[{"index":0,"text":'
        )
        self._after = (
            (b"}" if is_chat else b"")
            + b',"logprobs":null,"finish_reason":null}]'
            + self._usage_null
            + b"}\n\n"
        )

    def opening(self) -> bytes:
        """What comes first: the role in a chat, the echoed prompt if asked for."""
        if self._call.dialect is Dialect.CHAT:
            return self._head + _ROLE + self._usage_null + b"}\n\n"
        return self._before + _encode(self._call.echo) + self._after if self._call.echo else b""

    def chunk(self, text: str, ids: Sequence[int]) -> bytes:
        """New text and the tokens it came with; empty bytes when there is nothing to show."""
        if self._call.token_ids:
            return self._before + _encode(text) + b',"token_ids":' + _encode(ids) + self._after
        return self._before + _encode(text) + self._after if text else b""

    def closing(self, text: str, tokens: int, reason: FinishReason) -> bytes:
        """The end: the last text, the reason, the usage if asked for, `[DONE]`."""
        call = self._call
        if call.dialect is Dialect.PLAIN:
            return event(_encode(_summary(call, self._model, text, tokens, reason))) + DONE
        last = b'"text":' + _encode(text)
        if call.dialect is Dialect.CHAT:
            last = b'"delta":{"content":' + _encode(text) + b"}" if text else b'"delta":{}'
        end = self._head + b'"choices":[{"index":0,%b,"logprobs":null,"finish_reason":"%b"}]%b}\n\n' % (
            last,
            reason.encode(),
            self._usage_null,
        )
        if call.include_usage:
            end += self._head + b'"choices":[],"usage":' + _encode(_usage(call, tokens)) + b"}\n\n"
        return end + DONE


def _identifier(dialect: Dialect) -> str:
    return f"{_PREFIXES[dialect]}-{random.getrandbits(96):024x}"


def _summary(call: Call, model: str, text: str, tokens: int, reason: FinishReason) -> dict[str, Any]:
    generation = call.generation
    return {
        "text": text,
        "tokens": tokens,
        "prompt_tokens": len(generation.prompt),
        "finish_reason": reason,
        "seed": generation.seed,
        "model": model,
    }


def _usage(call: Call, tokens: int) -> dict[str, int]:
    prompt = len(call.generation.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

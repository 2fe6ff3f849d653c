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

from keystage.router.idempotency import Stamp
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


def stamp_of(call: Call) -> Stamp:
    """What is drawn for one request, so that its answer can be written again."""
    prefix = _PREFIXES.get(call.dialect)
    identifier = f"{prefix}-{random.getrandbits(96):024x}" if prefix else ""
    return Stamp(call.generation.seed, identifier, int(time.time()))


def whole(call: Call, model: str, stamp: Stamp, text: str, ids: Sequence[int], reason: FinishReason) -> bytes:
    """The answer in one JSON body.

    Args:
        call: the request.
        model: the pipeline's name.
        stamp: what was drawn for it.
        text: all of the text, without the echoed prompt.
        ids: all of the tokens.
        reason: why it ended.
    """
    if call.dialect is Dialect.PLAIN:
        summary = _summary(call, model, stamp, text, len(ids), reason)
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
            "id": stamp.identifier,
            "object": "chat.completion" if call.dialect is Dialect.CHAT else "text_completion",
            "created": stamp.created_s,
            "model": model,
            "choices": [choice],
            "usage": _usage(call, len(ids)),
        }
    )


class Events:
    """The answer in server-sent events: `opening`, any number of `chunk`, `closing`.

    A chunk is `before + text [+ ids] + after`; only text and ids differ from chunk to chunk. Numbered events
    say (`id:`) how many tokens of the answer a client has that has read them.

    Args:
        call: the request.
        model: the pipeline's name.
        stamp: what was drawn for it.
        is_numbered: whether the events are numbered.
    """

    __slots__ = ("_after", "_before", "_call", "_head", "_is_numbered", "_model", "_stamp", "_usage_null")

    def __init__(self, call: Call, model: str, stamp: Stamp, *, is_numbered: bool = False) -> None:
        self._call = call
        self._model = model
        self._stamp = stamp
        self._is_numbered = is_numbered
        self._usage_null = b',"usage":null' if call.include_usage else b""
        if call.dialect is Dialect.PLAIN:
            self._head = b"data: {"
            self._before = b'data: {"text":'
            self._after = b"}\n\n"
            return
        is_chat = call.dialect is Dialect.CHAT
        self._head = b'data: {"id":"%b","object":"%b","created":%d,"model":%b,' % (
            stamp.identifier.encode(),
            b"chat.completion.chunk" if is_chat else b"text_completion",
            stamp.created_s,
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
            return self._number(0) + self._head + _ROLE + self._usage_null + b"}\n\n"
        if not self._call.echo:
            return b""
        return self._number(0) + self._before + _encode(self._call.echo) + self._after

    def chunk(self, text: str, ids: Sequence[int], tokens: int) -> bytes:
        """New text and the tokens it came with; empty bytes when there is nothing to show.

        Args:
            text: new text.
            ids: new tokens.
            tokens: all tokens of the answer so far.
        """
        if self._call.token_ids:
            shown = self._before + _encode(text) + b',"token_ids":' + _encode(ids) + self._after
        elif text:
            shown = self._before + _encode(text) + self._after
        else:
            return b""
        return self._number(tokens) + shown if self._is_numbered else shown

    def closing(self, text: str, tokens: int, reason: FinishReason) -> bytes:
        """The end: the last text, the reason, the usage if asked for, `[DONE]`."""
        call = self._call
        if call.dialect is Dialect.PLAIN:
            summary = _summary(call, self._model, self._stamp, text, tokens, reason)
            return self._number(tokens) + event(_encode(summary)) + DONE
        last = b'"text":' + _encode(text)
        if call.dialect is Dialect.CHAT:
            last = b'"delta":{"content":' + _encode(text) + b"}" if text else b'"delta":{}'
        number = self._number(tokens)
        end = (
            number
            + self._head
            + b'"choices":[{"index":0,%b,"logprobs":null,"finish_reason":"%b"}]%b}\n\n'
            % (
                last,
                reason.encode(),
                self._usage_null,
            )
        )
        if call.include_usage:
            usage = b'"choices":[],"usage":' + _encode(_usage(call, tokens)) + b"}\n\n"
            end += number + self._head + usage
        return end + DONE

    def _number(self, tokens: int) -> bytes:
        return b"id: %d\n" % tokens if self._is_numbered else b""


def _summary(
    call: Call, model: str, stamp: Stamp, text: str, tokens: int, reason: FinishReason
) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": tokens,
        "prompt_tokens": len(call.generation.prompt),
        "finish_reason": reason,
        "seed": stamp.seed,
        "model": model,
    }


def _usage(call: Call, tokens: int) -> dict[str, int]:
    prompt = len(call.generation.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

"""Reads a completion stream: server-sent events in, first token, last token and counts out.

Used by `sender` for every streamed answer. Pure: bytes and times come in. It must stay cheap, for
it runs once per chunk received.
"""

from __future__ import annotations

from typing import Any

import msgspec

from keystage.wire.unreadable import UNREADABLE


class _Choice(msgspec.Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)

DONE = b"[DONE]"

MAX_EVENT_BYTES = 4 << 20
"""Of one event; a server that sends no end of one would otherwise fill the memory."""


class EventParser:
    """Cuts a byte stream into the data of its events (WHATWG server-sent events, `data` only)."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Returns the data of every event completed by these bytes."""
        buffer = self._rest + received
        if b"\r" in buffer:
            held = buffer.endswith(b"\r")
            buffer = buffer[: len(buffer) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *events, self._rest = buffer.split(b"\n\n")
        return [data for event in events if (data := _data(event))]

    @property
    def held_bytes(self) -> int:
        """Bytes of the event that is not complete yet."""
        return len(self._rest)

    @property
    def is_clean(self) -> bool:
        """Whether the stream stands between two events."""
        return not self._rest.strip()


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class StreamTally:
    """Follows one streamed completion.

    Attributes:
        first_s: when the first text arrived, None before.
        last_s: when the newest text or the finish arrived, None before.
        prompt_tokens: from `usage`, else None.
        output_tokens: from `usage`; before it, or without it, the number of chunks with text.
        error: `stream_error: ...` for an error event, `bad_answer: ...` for what cannot be read.
        is_done: whether `[DONE]` came.
        is_oversized: whether an event became longer than is read.
    """

    __slots__ = ("_chunks", "_parser", "_usage", "error", "first_s", "is_done", "is_oversized", "last_s")

    def __init__(self) -> None:
        self._parser = EventParser()
        self._chunks = 0
        self._usage: _Usage | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.error = ""
        self.is_done = False
        self.is_oversized = False

    def feed(self, received: bytes, now_s: float) -> None:
        """Takes bytes received at `now_s`."""
        for data in self._parser.feed(received):
            if data == DONE:
                self.is_done = True
            else:
                self._take(data, now_s)
        if self._parser.held_bytes > MAX_EVENT_BYTES:
            self.is_oversized = True
            self.error = self.error or f"bad_answer: an event of over {MAX_EVENT_BYTES} bytes"

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            chunk = _decoder.decode(data)
        except UNREADABLE as error:
            self.error = self.error or f"bad_answer: {error}"
            return
        if chunk.error is not None:
            self.error = self.error or f"stream_error: {str(chunk.error)[:200]}"
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.text:
                self._chunks += 1
                self.first_s = now_s if self.first_s is None else self.first_s
            if choice.text or choice.finish_reason:
                self.last_s = now_s

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens as the server counted them."""
        return self._usage.prompt_tokens if self._usage else None

    @property
    def output_tokens(self) -> int:
        """Tokens answered."""
        return self._usage.completion_tokens if self._usage else self._chunks

    def verdict(self) -> str:
        """Why the stream that has ended is no complete answer, empty if it is one."""
        if self.error:
            return self.error
        if not self.is_done:
            return f"truncated: the stream ended without [DONE] after {self._chunks} chunks"
        return ""

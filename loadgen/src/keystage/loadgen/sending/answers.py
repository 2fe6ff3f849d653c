"""What of an answer is kept: first and last moment, tokens, and why it is no complete answer.

Fed by `http1` and `http2` with the parts of one answer as they arrive; `client` takes the verdict. Pure:
bytes and times come in. One object an attempt, so that a retry starts from nothing.
"""

from __future__ import annotations

import msgspec

from keystage.loadgen.sending.row import Row
from keystage.loadgen.sse import StreamTally
from keystage.wire.unreadable import UNREADABLE

ERROR_BYTES = 200
"""As much of an error's body as is told."""

MAX_JSON_BYTES = 64 << 20
"""An answer whose tokens are read is kept until it ends: more than this is refused, not kept."""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0


class _Segment(msgspec.Struct):
    tokens: list[int] = []


class _Told(msgspec.Struct):
    """What is read of an answer: its tokens.

    A plain call tells them at the top, OpenAI's embeddings in `usage`, its transcripts segment by segment.
    """

    tokens: int = 0
    prompt_tokens: int | None = None
    usage: _Usage | None = None
    segments: list[_Segment] = []


_told = msgspec.json.Decoder(_Told)


def read_tokens(received: bytes | bytearray, row: Row) -> None:
    """Fills in the tokens that a whole JSON answer tells, or the row's error if it is no JSON object."""
    try:
        answer = _told.decode(received)
    except UNREADABLE as error:
        row.error = f"bad_answer: {error}"
        return
    row.prompt_tokens, row.output_tokens = answer.prompt_tokens, answer.tokens
    if answer.usage is not None:
        row.prompt_tokens, row.output_tokens = answer.usage.prompt_tokens, answer.usage.completion_tokens
    row.output_tokens += sum(len(segment.tokens) for segment in answer.segments)


class Answer:
    """An answer of which only the times count (raw bodies, stream programs).

    Attributes:
        status: of the head, 0 before it came.
        refused: why no more of it is read; empty while all is well.
    """

    __slots__ = ("first_s", "refused", "status", "told")

    def __init__(self) -> None:
        self.status = 0
        self.refused = ""
        self.first_s: float | None = None
        self.told = b""

    def feed(self, part: bytes, now_s: float) -> None:
        """Takes a part of the body received at `now_s`."""
        if self.status == 200:
            self.take(part, now_s)
        elif len(self.told) < ERROR_BYTES:
            self.told = (self.told + part)[:ERROR_BYTES]

    def take(self, part: bytes, now_s: float) -> None:
        """Takes a part of a good answer."""
        if self.first_s is None and part:
            self.first_s = now_s

    def complete(self, row: Row, now_s: float) -> None:
        """Fills the row of an answer that has wholly arrived, with an error where it is none."""
        row.status = self.status
        row.last_s = now_s
        if self.status == 200:
            self.fill(row, now_s)
        else:
            row.error = f"http_{self.status}: {self.told.decode(errors='replace')}"

    def fill(self, row: Row, now_s: float) -> None:
        """Fills the row of a good answer."""
        row.first_s = now_s if self.first_s is None else self.first_s

    def broken(self, row: Row, now_s: float) -> None:
        """Fills the row with as much as arrived before the answer broke off."""
        row.status = self.status
        row.last_s = now_s
        row.first_s = self.first_s


class JsonAnswer(Answer):
    """An answer whose JSON tells its tokens."""

    __slots__ = ("_received",)

    def __init__(self) -> None:
        super().__init__()
        self._received = bytearray()

    def take(self, part: bytes, now_s: float) -> None:
        """Keeps the part."""
        if self.first_s is None and part:
            self.first_s = now_s
        self._received += part
        if len(self._received) > MAX_JSON_BYTES:
            self.refused = f"bad_answer: over {MAX_JSON_BYTES} bytes"

    def fill(self, row: Row, now_s: float) -> None:
        """Reads the tokens."""
        row.first_s = now_s if self.first_s is None else self.first_s
        read_tokens(self._received, row)


class StreamAnswer(Answer):
    """A completion that arrives token by token."""

    __slots__ = ("_tally",)

    def __init__(self) -> None:
        super().__init__()
        self._tally = StreamTally()

    def take(self, part: bytes, now_s: float) -> None:
        """Follows the events."""
        self._tally.feed(part, now_s)
        if self._tally.is_oversized:
            self.refused = self._tally.error

    def fill(self, row: Row, now_s: float) -> None:
        """Tells first and last token, counts, and whether the stream was whole."""
        tally = self._tally
        row.first_s, row.prompt_tokens, row.output_tokens = (
            tally.first_s,
            tally.prompt_tokens,
            tally.output_tokens,
        )
        row.error = tally.verdict()
        row.last_s = now_s if tally.last_s is None or row.error else tally.last_s
        if row.first_s is None and not row.error:
            row.first_s = row.last_s

    def broken(self, row: Row, now_s: float) -> None:
        """Keeps the tokens that came."""
        super().broken(row, now_s)
        row.first_s = self._tally.first_s
        row.prompt_tokens, row.output_tokens = self._tally.prompt_tokens, self._tally.output_tokens

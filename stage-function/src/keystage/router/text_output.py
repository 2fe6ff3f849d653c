"""One session's answer: token ids in, text out, and why it ended.

Between the engine's iterator and the renderer. It joins the incremental decoder, the stop
strings, the end tokens and the count of tokens. Pure: no IO, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from keystage.router.text import IncrementalDecoder
from keystage.router.text_stop import StopMatcher

FinishReason = Literal["stop", "length"]


class TextOutput:
    """The answer so far.

    Attributes:
        tokens: tokens generated, the end token included.
        reason: `stop` once an end token or a stop string came, else None.
        is_cut: a stop string came, so the engine would go on and must be told to end.
    """

    __slots__ = ("_decoder", "_eos", "_stop", "is_cut", "reason", "tokens")

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], eos: Sequence[int]) -> None:
        self._decoder = decoder
        self._stop = StopMatcher(stops) if stops else None
        self._eos = eos
        self.tokens = 0
        self.is_cut = False
        self.reason: FinishReason | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Takes ids that came together and returns the text to show now.

        With stop strings ids are taken one by one, so that the count does not depend on how many
        came together; ids after the one that completes a stop string are not counted.
        """
        if self._stop is None:
            self.tokens += len(ids)
            if ids and ids[-1] in self._eos:
                self.reason = "stop"
                ids = ids[:-1]
            return self._decoder.push(ids)
        shown = []
        for token in ids:
            self.tokens += 1
            if token in self._eos:
                self.reason = "stop"
                break
            shown.append(self._stop.push(self._decoder.push((token,))))
            if self._stop.matched is not None:
                self.reason = "stop"
                self.is_cut = True
                break
        return "".join(shown)

    def finish(self) -> tuple[str, FinishReason]:
        """Ends the answer: the text still held back, and the reason."""
        if self._stop is None:
            return self._decoder.flush(), self.reason or "length"
        if self._stop.matched is not None:
            return "", "stop"
        tail = self._stop.push(self._decoder.flush())
        if self._stop.matched is not None:
            return tail, "stop"
        return tail + self._stop.flush(), self.reason or "length"

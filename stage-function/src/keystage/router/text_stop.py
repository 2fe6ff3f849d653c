"""Finds stop strings in a stream of text without ever showing a part of one.

Between the decoder, which lets whole characters out, and the client. Text that may be the start
of a stop string is held back until the next text decides. Pure: no IO, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """State of one stream.

    Attributes:
        matched: the stop string that ended the text, None so far.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes new text and returns what may be shown.

        After a match nothing more is shown. Of several stop strings complete in the same text the
        one that begins first ends it.
        """
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The stream ended without a match: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

"""The event log: one line of text per event, and its digest.

Before it: the engine's parts tell what happened. After it: people and tests compare runs byte for byte.
A line is `seconds kind subject detail`, with seconds as the shortest text that reads back the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_LINES = 4096


class EventLog:
    """Writes lines to a file and hashes them.

    Args:
        path: file to write, replaced if present.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._lines: list[str] = []

    def write(self, at_s: float, kind: str, subject: str, detail: object = "") -> None:
        """Adds one line."""
        self._lines.append(f"{at_s!r} {kind} {subject} {detail}\n")
        if len(self._lines) >= _LINES:
            self._flush()

    def close(self) -> str:
        """Ends the file and answers its sha256 in hex."""
        self._flush()
        self._file.close()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        block = "".join(self._lines).encode()
        self._lines.clear()
        self._digest.update(block)
        self._file.write(block)

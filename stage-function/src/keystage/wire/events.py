"""Event log: what happened, one JSON object a line, for tests and for people who look closer.

Off unless a folder is given (`KEYSTAGE_EVENTS`). Lines are buffered and flushed at least every
second by the callers' heart beat, so that a wave costs microseconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

FLUSH_LINES = 256


class EventLog:
    """Appends events to `<folder>/<name>.jsonl`.

    Args:
        folder: where to write; None switches it off.
        name: file stem, one per process.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._file: BinaryIO | None = None
        self._pending = 0
        self._encoder = msgspec.json.Encoder()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{name}.jsonl").open("ab", buffering=1 << 16)

    def __bool__(self) -> bool:
        return self._file is not None

    def write(self, event: str, **fields: Any) -> None:
        """Adds one line `{"t": unix seconds, "event": ..., ...}`."""
        if self._file is None:
            return
        self._file.write(self._encoder.encode({"t": time.time(), "event": event, **fields}) + b"\n")
        self._pending += 1
        if self._pending >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Hands buffered lines to the system."""
        if self._file is not None and self._pending:
            self._file.flush()
            self._pending = 0

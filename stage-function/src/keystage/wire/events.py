"""Event log: what happened, one JSON object a line, for tests and for people who look closer.

Off unless a folder is given (`KEYSTAGE_EVENTS`). Lines are buffered and flushed at least every second by the
callers' heart beat, so that a wave costs microseconds. A disk that takes nothing (full, gone, read-only)
costs lines, which are counted, and nothing else: whoever serves goes on.
"""

from __future__ import annotations

import logging
import time
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

FLUSH_LINES = 256
MOST_KEPT_BYTES = 1 << 20
"""Lines that wait for a disk which takes nothing; what comes beyond that is lost."""
TELL_EVERY_S = 60.0


class EventLog:
    """Appends events to `<folder>/<name>.jsonl`.

    Args:
        folder: where to write; None switches it off, and so does a folder that cannot be used.
        name: file stem, one per process.

    Attributes:
        lost: lines that the disk did not take.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self.lost = 0
        self._file: FileIO | None = None
        self._lines: list[bytes] = []
        self._pending = 0
        self._kept_bytes = 0
        self._told_lost = 0
        self._told_s = -TELL_EVERY_S
        self._encoder = msgspec.json.Encoder()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / f"{name}.jsonl").open("ab", buffering=0)
            except OSError as error:
                log.error("no event log in %s: %s", folder, error.strerror or error)

    def __bool__(self) -> bool:
        return self._file is not None

    def write(self, event: str, **fields: Any) -> None:
        """Adds one line `{"t": unix seconds, "event": ..., ...}`."""
        if self._file is None:
            return
        line = self._encoder.encode({"t": time.time(), "event": event, **fields}) + b"\n"
        if self._kept_bytes > MOST_KEPT_BYTES:
            self.lost += 1
            return
        self._lines.append(line)
        self._kept_bytes += len(line)
        self._pending += 1
        if self._pending >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Hands buffered lines to the system."""
        if self._file is None or not self._lines:
            return
        self._pending = 0
        if self.lost > self._told_lost and self._kept_bytes < MOST_KEPT_BYTES:
            self._told_lost = self.lost
            self._lines.append(
                self._encoder.encode({"t": time.time(), "event": "lines_lost", "lines": self.lost}) + b"\n"
            )
        data = b"".join(self._lines)
        try:
            written = self._file.write(data)
        except OSError as error:
            self._complain(error)
            return
        rest = data[written:]
        self._lines = [rest] if rest else []
        self._kept_bytes = len(rest)

    def _complain(self, error: OSError) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.warning(
                "the event log %s takes nothing: %s (%d bytes wait, %d lines lost)",
                self._file.name if self._file is not None else "", error.strerror or error,
                self._kept_bytes, self.lost,
            )  # fmt: skip

"""`requests.jsonl`: one JSON object a request, written while the run goes, and read again.

Comes beside `sender`, which hands over each row when it has ended; `compare` and whoever merges the
runs of several machines read it. Lines stand in the order in which requests ended, failed ones
included, so that a run that is broken off leaves what it has measured. A thread encodes and writes:
the event loop that keeps the schedule does nothing but append to a queue.

Fields are those of `Row`, times in seconds since the start of the run.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from keystage.loadgen import files
from keystage.loadgen.sender import Row
from keystage.wire.unreadable import UNREADABLE

FILE = "requests.jsonl"

WRITE_EVERY_S = 0.5
MAX_LINE_BYTES = 1 << 16
"""An error holds 200 bytes of an answer; a file that is another's may have no line break at all."""

_BATCH = 200
"""Rows encoded before the thread gives the interpreter away: about 0.2 ms."""


class RequestLogError(Exception):
    """A file of requests that cannot be used; names file and line (exit code 2)."""


class RequestLog:
    """Writes rows as they come; `with` opens the file and closes it when all is written.

    A write that fails (a full disk) ends the writing, not the run: the error is raised by `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: collections.deque[Row] = collections.deque()
        self._end = threading.Event()
        self._file: IO[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._failed: OSError | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, row: Row) -> None:
        """Takes a row that has ended; cheap."""
        self._rows.append(row)

    def close(self) -> None:
        """Writes what is left.

        Raises:
            OSError: something could not be written.
        """
        self._end.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        while not self._end.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        encode = msgspec.json.Encoder().encode
        while self._rows:
            lines = [encode(self._rows.popleft()) + b"\n" for _ in range(min(_BATCH, len(self._rows)))]
            try:
                if self._file is not None and self._failed is None:
                    self._file.write(b"".join(lines))
            except OSError as error:
                self._failed = error
            time.sleep(0)
        try:
            if self._file is not None and self._failed is None:
                self._file.flush()
        except OSError as error:
            self._failed = error


def write(rows: Iterable[Row], path: Path) -> Path:
    """Writes all rows of a run that is over, and returns the path.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.Encoder().encode
    with files.whole(path) as part, part.open("wb") as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    return path


def read(path: Path) -> tuple[list[Row], list[str]]:
    """Rows in the order of the schedule, and what was repaired, in words.

    A last line without its end is a run that was broken off while it wrote: left out, and told.

    Raises:
        RequestLogError: the file cannot be read, a line is no request, two have one index, or there is none.
    """
    rows: dict[int, Row] = {}
    notes = []
    decode = msgspec.json.Decoder(Row).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise RequestLogError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes, which no request is"
                    )
                if not line.endswith(b"\n"):
                    notes.append(f"{path}, line {number}: broken off, left out")
                    break
                if not line.strip():
                    continue
                row = _checked(decode, line, f"{path}, line {number}")
                if row.index in rows:
                    raise RequestLogError(f"{path}, line {number}: request {row.index} is there already")
                rows[row.index] = row
    except OSError as error:
        raise RequestLogError(f"{path}: {error.strerror}") from error
    if not rows:
        raise RequestLogError(f"{path}: holds no request")
    return [rows[index] for index in sorted(rows)], notes


def _checked(decode: Callable[[bytes], Row], line: bytes, where: str) -> Row:
    try:
        row = decode(line)
    except UNREADABLE as error:
        raise RequestLogError(f"{where}: no request: {error}") from error
    times = (row.scheduled_s, row.sent_s, row.last_s, row.first_s or 0.0)
    if not all(math.isfinite(value) and value >= 0 for value in times) or row.index < 0:
        raise RequestLogError(f"{where}: an index or time below 0")
    return row

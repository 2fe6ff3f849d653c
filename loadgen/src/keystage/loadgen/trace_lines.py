"""Lines of a trace file, plain or gzip, one by one and numbered; and the error that names a line.

First in the flow of every trace reader. A file is never held whole: a line has a bound, so that a
binary file without line breaks ends in an error too. Nothing here knows any format.
"""

from __future__ import annotations

import csv
import gzip
import math
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

MAX_LINE_BYTES = 1 << 20
"""A day of minutes takes 13 KB at most; prefix blocks of ten million tokens take 200 KB."""

_GZIP_MAGIC = b"\x1f\x8b"

Notes = dict[str, str]
"""What was repaired or should be known about a file, by topic."""


class TraceError(Exception):
    """A trace that cannot be used: names file, line and what was found there."""

    def __init__(self, path: Path, line: int, found: str) -> None:
        super().__init__(f"trace {path}, line {line}: {found}")
        self.path = path
        self.line = line
        self.found = found


def lines(path: Path, notes: Notes | None = None) -> Iterator[tuple[int, str]]:
    """Streams (line number, text without its line break); blank lines are left out.

    A gzip file is known by its first two bytes. A byte order mark is dropped.

    Args:
        path: a regular file.
        notes: told under "end" when the last line has no line break: a file cut there looks alike.

    Raises:
        TraceError: not readable, not text, a damaged or cut gzip stream, a line above
            MAX_LINE_BYTES. Line 0 is the file itself.
    """
    number = 0
    is_last_whole = True
    try:
        with _opened(path) as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                text = _text(path, number, raw)
                if text:
                    yield number, text
                is_last_whole = raw.endswith(b"\n")
    except OSError as error:
        if number or isinstance(error, gzip.BadGzipFile):
            raise TraceError(path, number + 1, f"cannot be read further: {_reason(error)}") from error
        raise TraceError(path, 0, f"cannot be read: {_reason(error)}") from error
    except EOFError as error:
        raise TraceError(path, number + 1, "the gzip stream ends here: the file is cut") from error
    except zlib.error as error:
        raise TraceError(path, number + 1, f"the gzip stream is damaged: {error}") from error
    if notes is not None and number and not is_last_whole:
        notes["end"] = f"line {number}, the last, has no line break; it is taken as whole"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a zero byte in the name
        raise TraceError(path, 0, f"cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise TraceError(path, 0, f"cannot be read: it is {kind}")
    with path.open("rb") as file:
        magic = file.read(2)
    if magic == _GZIP_MAGIC:
        return gzip.open(path, "rb")
    if path.suffix == ".gz":
        found = "is empty" if not magic else "is no gzip file, though its name says so"
        raise TraceError(path, 1, found)
    return path.open("rb")


def _text(path: Path, number: int, raw: bytes) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise TraceError(path, number, f"longer than {MAX_LINE_BYTES} bytes: no line of a trace")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at {error.start}"
        raise TraceError(path, number, f"is not text: {found} ({error.reason})") from error
    if "\0" in text:
        raise TraceError(path, number, f"is not text: zero byte at {text.index(chr(0))}")
    return "" if text.isspace() else text


def cells(path: Path, number: int, text: str) -> list[str]:
    """The fields of a CSV line; quotes are honoured, a field must end in its line.

    Raises:
        TraceError: a quote that is not closed, a field beyond the csv module's bound.
    """
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise TraceError(path, number, f"is not CSV: {error}") from error


def shown(fields: Sequence[str]) -> str:
    """Fields as an error shows them: quoted, at most 80 characters."""
    text = ",".join(fields)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def number_in(path: Path, line: int, name: str, cell: str, most: float) -> float:
    """A finite number in 0..most.

    Raises:
        TraceError: anything else, with the column's name and what was found.
    """
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TraceError(path, line, f"{name} is not a finite number: {shown([cell])}")
    if not 0 <= value <= most:
        raise TraceError(path, line, f"{name} must be in 0..{most:g}, found {shown([cell])}")
    return value

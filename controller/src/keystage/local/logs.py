"""What replicas print: one bounded file per replica, lines with their time.

`local.process` appends, `local.control` queries. A file holds `unix_s|line`; past its bound it
becomes `<replica>.log.1` and a new one begins, so a replica keeps at most twice the bound. It
must not know processes.
"""

from __future__ import annotations

import os
import re
from io import FileIO
from pathlib import Path

MAX_FILE_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 10
KEPT_PER_FUNCTION = 16
"""Replicas per function whose files stay: a crash loop makes a new replica every 30 s."""

_NAME = re.compile(r"(?P<function>.+)-(?P<number>\d+)\.log(?P<old>\.1)?")


class ReplicaLog:
    """Log of one replica, also the asyncio protocol's sink for its output.

    Attributes:
        last: newest line that is not empty, for the reason of a crash.
    """

    def __init__(self, file: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.last = ""
        self._file = file
        self._max_bytes = max_bytes
        self._out = _opened(file)
        self._size = self._out.tell()
        self._partial = b""

    def feed(self, data: bytes, at_s: float) -> None:
        """Takes raw output; writes every line that is complete."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._write(lines, at_s)

    def close(self, at_s: float) -> None:
        """Writes an unfinished last line and closes the file."""
        if self._partial:
            self._write([self._partial], at_s)
            self._partial = b""
        self._out.close()

    def _write(self, lines: list[bytes], at_s: float) -> None:
        stamp = f"{at_s:.6f}|".encode()
        for line in lines:
            text = line[:MAX_LINE_BYTES].rstrip(b"\r")
            if text.strip():
                self.last = text.decode("utf-8", "replace")
        body = b"".join(stamp + line[:MAX_LINE_BYTES].rstrip(b"\r") + b"\n" for line in lines)
        try:
            if self._size and self._size + len(body) > self._max_bytes:
                self._file.replace(self._file.with_name(self._file.name + ".1"))
                self._out.close()
                self._out = _opened(self._file)
                self._size = 0
            self._out.write(body)
        except OSError:
            return  # a full disk costs lines of a log, never the process they are of
        self._size += len(body)


def _opened(file: Path) -> FileIO:
    """For appending, by its owner alone: what a program prints is as private as what it is given."""
    out = FileIO(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
    os.fchmod(out.fileno(), 0o600)
    return out


def query(folder: Path, function: str, *, tail: int | None, since_s: float) -> list[tuple[float, str, str]]:
    """Reads a function's lines in order of time.

    Args:
        folder: folder of the logs.
        function: function name.
        tail: newest lines at most, None for all that are kept.
        since_s: only lines later than this (Unix seconds).

    Returns:
        (unix_s, replica, line) tuples.
    """
    rows: list[tuple[float, str, str]] = []
    for _, file in _files(folder, function):
        replica = file.name.removesuffix(".1").removesuffix(".log")
        for raw in file.read_bytes().split(b"\n"):
            stamp, mark, line = raw.partition(b"|")
            if not mark:
                continue
            at_s = float(stamp)
            if at_s > since_s:
                rows.append((at_s, replica, line.decode("utf-8", "replace")))
    rows.sort(key=lambda row: row[0])
    if tail is not None:
        rows = rows[max(0, len(rows) - tail) :]
    return rows


def prune(folder: Path, function: str) -> None:
    """Removes the files of a function's oldest replicas beyond what is kept."""
    files = sorted(_files(folder, function), key=lambda item: item[1].stat().st_mtime, reverse=True)
    seen: set[int] = set()
    for number, file in files:
        seen.add(number)
        if len(seen) > KEPT_PER_FUNCTION:
            file.unlink(missing_ok=True)


def _files(folder: Path, function: str) -> list[tuple[int, Path]]:
    found = []
    for file in folder.iterdir():
        match = _NAME.fullmatch(file.name)
        if match and match["function"] == function:
            found.append((int(match["number"]), file))
    return sorted(found, key=lambda item: (item[0], -len(item[1].name)))

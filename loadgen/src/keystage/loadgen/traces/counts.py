"""Counts by row of a file, given back by minute: a sort with bounded memory.

The 2019 files have a line a function and a column a minute, a replay needs minutes first. Only
counts above 0 are kept, twelve bytes each, BUFFERED of them in memory; what exceeds that goes to a
temporary file as runs sorted by minute, and a minute is gathered from all runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from keystage.loadgen.traces.model import Ints

BUFFERED = 1_000_000

_Rows = npt.NDArray[np.int32]
_RECORD = np.dtype([("row", np.int32), ("count", np.int32)])


class CountStore:
    """Counts put in by row and taken out by minute.

    Args:
        minutes: number of minute columns.
        buffered: counts in memory before a run is written.
    """

    def __init__(self, minutes: int, buffered: int = BUFFERED) -> None:
        self._minutes = minutes
        self._buffered = buffered
        self._pending: list[tuple[_Rows, _Rows, _Rows]] = []
        self._held = 0
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, Ints]] = []
        self._last: npt.NDArray[np.void] = np.empty(0, _RECORD)
        self._bounds: Ints = np.zeros(minutes + 1, np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: int, counts: Ints) -> None:
        """Takes a row's counts, shape (minutes,); rows ascend.

        Raises:
            OSError: the temporary file cannot be written.
        """
        minutes = np.flatnonzero(counts).astype(np.int32)
        rows = np.full(len(minutes), row, np.int32)
        self._pending.append((minutes, rows, counts[minutes].astype(np.int32)))
        self._held += len(minutes)
        if self._held >= self._buffered:
            self._spill()

    def by_minute(self) -> Iterator[tuple[int, _Rows, Ints]]:
        """(minute index, rows ascending, their counts) of every minute that has any.

        Raises:
            OSError: the temporary file cannot be read.
        """
        self._last, self._bounds = self._sorted()
        for minute in range(self._minutes):
            parts = [self._read(offset, bounds, minute) for offset, bounds in self._runs]
            parts.append(self._last[self._bounds[minute] : self._bounds[minute + 1]])
            records = np.concatenate(parts) if len(parts) > 1 else parts[0]
            if len(records):
                yield minute, records["row"], records["count"].astype(np.int64)

    def _sorted(self) -> tuple[npt.NDArray[np.void], Ints]:
        if not self._pending:
            return np.empty(0, _RECORD), np.zeros(self._minutes + 1, np.int64)
        minutes, rows, counts = (np.concatenate(column) for column in zip(*self._pending, strict=True))
        self._pending, self._held = [], 0
        order = np.argsort(minutes, kind="stable")
        records = np.empty(len(order), _RECORD)
        records["row"], records["count"] = rows[order], counts[order]
        bounds = np.searchsorted(minutes[order], np.arange(self._minutes + 1))
        return records, bounds.astype(np.int64)

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="keystage-trace-")  # noqa: SIM115 (closed by __exit__)
        records, bounds = self._sorted()
        offset = self._file.seek(0, 2)
        self._file.write(records.tobytes())
        self._runs.append((offset, bounds))

    def _read(self, offset: int, bounds: Ints, minute: int) -> npt.NDArray[np.void]:
        assert self._file is not None
        low, high = int(bounds[minute]), int(bounds[minute + 1])
        self._file.seek(offset + low * _RECORD.itemsize)
        return np.frombuffer(self._file.read((high - low) * _RECORD.itemsize), _RECORD)

"""The files beside a day of the 2019 trace: durations by function, memory by app.

Columns are found by name, for samplers add and move some; only those used here are checked. Of a
function or app with several rows the first counts, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from keystage.loadgen.trace_lines import Notes, TraceError, cells, lines, number_in, shown

PROBABILITIES = (0.0, 0.01, 0.25, 0.50, 0.75, 0.99, 1.0)
"""Of the duration percentiles that the file gives (of averages over 30 s, weighted by count)."""

MAX_DURATION_S = 1e8
MAX_MEMORY_MB = 1e9

_PERCENTILES = tuple(f"percentile_Average_{round(100 * p)}" for p in PROBABILITIES)


def read_durations(path: Path, notes: Notes) -> dict[tuple[str, str], tuple[float, ...]]:
    """Duration percentiles in seconds at PROBABILITIES, by (app, func).

    Percentiles that descend are raised to the one before them, and counted in the notes.

    Raises:
        TraceError: unreadable, wrong columns, a number missing, not finite, negative or too large.
    """
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    repeated = descending = 0
    for line, row in _rows(path, ("HashApp", "HashFunction", *_PERCENTILES), notes):
        values = [
            number_in(path, line, name, cell, 1000 * MAX_DURATION_S) / 1000
            for name, cell in zip(_PERCENTILES, row[2:], strict=True)
        ]
        raised = [max(values[: at + 1]) for at in range(len(values))]
        descending += raised != values
        repeated += (row[0], row[1]) in found
        found.setdefault((row[0], row[1]), tuple(raised))
    _note(notes, "durations repeated", repeated, f"row(s) of {path.name} repeat a function; the first counts")
    _note(
        notes, "durations descending", descending,
        f"row(s) of {path.name} have a percentile below a lower one; it was raised to that",
    )  # fmt: skip
    return found


def read_memory(path: Path, notes: Notes) -> dict[str, float]:
    """Average allocated memory in MB by app.

    Raises:
        TraceError: as `read_durations`.
    """
    found: dict[str, float] = {}
    differing = 0
    for line, (app, cell) in _rows(path, ("HashApp", "AverageAllocatedMb"), notes):
        value = number_in(path, line, "AverageAllocatedMb", cell, MAX_MEMORY_MB)
        differing += found.setdefault(app, value) != value
    _note(notes, "memory differing", differing, f"row(s) of {path.name} differ for one app; the first counts")
    return found


def _note(notes: Notes, topic: str, count: int, words: str) -> None:
    if count:
        notes[topic] = f"{count} {words}"


def _rows(path: Path, wanted: Sequence[str], notes: Notes) -> Iterator[tuple[int, list[str]]]:
    ended: Notes = {}
    numbered = lines(path, ended)
    line, text = next(numbered, (1, None))
    if text is None:
        raise TraceError(path, 1, f"file is empty, expected a header with {wanted[0]}, ..., {wanted[-1]}")
    header = [name.strip() for name in cells(path, line, text)]
    missing = [name for name in wanted if header.count(name) != 1]
    if missing:
        raise TraceError(path, line, f"expected a header with one {missing[0]}, found {shown(header)}")
    places = [header.index(name) for name in wanted]
    count = 0
    for line, text in numbered:
        row = cells(path, line, text)
        if len(row) != len(header):
            raise TraceError(path, line, f"expected {len(header)} fields, found {len(row)}: {shown(row)}")
        count += 1
        yield line, [row[place] for place in places]
    if not count:
        raise TraceError(path, line, "no rows after the header")
    if ended:
        notes[f"end of {path.name}"] = f"{path.name}: {ended['end']}"


def unknown() -> tuple[float, ...]:
    """Percentiles of a function that the durations file does not have."""
    return (math.nan,) * len(PROBABILITIES)

"""Reads request traces: the Azure LLM CSV of 2023 and 2024, row by row.

First in the flow of a replay: its rows give arrival times (`arrivals`) and token lengths
(`lengths`). It reads files and nothing else: it draws no random numbers and knows no clock.
Other parts (the simulator) import it too. Traces of functions and other formats: `traces`.

Format: a header `TIMESTAMP,ContextTokens,GeneratedTokens` and one row per request. Two forms of
timestamp are published: `2023-11-16 18:17:03.9799600` (seven fractional digits, no zone; taken
as UTC) and ISO 8601 with `T` or a blank, any fraction, and a zone (`+00:00`, `Z`).

Source of the data: Patel et al., "Splitwise", ISCA 2024, and Stojkovic et al., "DynamoLLM", HPCA
2025; Azure/AzurePublicDataset, CC-BY-4.0.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from keystage.loadgen.trace_lines import Notes, TraceError, cells, lines, shown

__all__ = ["HEADER", "TraceError", "TraceRow", "read", "stamp_ticks"]

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

QUANTILE_PROBABILITIES = (
    0.0, 0.05, 0.10, 0.20, 0.25, 0.30, 0.40, 0.50, 0.60, 0.70, 0.75, 0.80, 0.90, 0.95, 0.99, 0.999, 1.0,
)  # fmt: skip
"""Probabilities of the quantiles below: dense enough that the interpolated distribution keeps the
trace's mean (1,154 against 1,154.7 context tokens, 214.7 against 211.1 generated tokens)."""

AZURE_CONV_CONTEXT_TOKENS = (
    2, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 2735, 4083, 4142, 6212, 14050,
)  # fmt: skip
"""Context-token quantiles of AzureLLMInferenceTrace_conv.csv (19,366 rows, commit
dc6c04155edfab91ccff1c0800b11b30572e8246 of Azure/AzurePublicDataset), inverted empirical CDF."""

AZURE_CONV_GENERATED_TOKENS = (
    7, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 424, 451, 601, 954, 1000,
)  # fmt: skip
"""Generated-token quantiles of the same file. (Its arrivals: 5.53 a second, CV 1.09; those of the
code trace: 2.57 a second, CV 13.2. Context and generated tokens correlate by -0.11 only.)"""

_TICKS_PER_S = 10_000_000
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\s?(Z|UTC|[+-]\d\d:?\d\d)?",
    re.ASCII,
)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        at_s: seconds since the first row.
        context_tokens: prompt length in tokens.
        generated_tokens: answer length in tokens.
    """

    at_s: float
    context_tokens: int
    generated_tokens: int


def stamp_ticks(text: str) -> int:
    """Turns a timestamp into 100 ns ticks since 1970 (a float would lose the seventh digit).

    Raises:
        ValueError: if the text has neither of the two published forms.
    """
    match = _STAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    date, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z", "UTC") else zone
    return _seconds(f"{date}T{clock}{zone}") * _TICKS_PER_S + int((fraction or "0").ljust(7, "0")[:7])


@functools.lru_cache(maxsize=64)
def _seconds(text: str) -> int:
    """Whole seconds since 1970; many rows share one."""
    return (dt.datetime.fromisoformat(text) - _EPOCH) // dt.timedelta(seconds=1)


def read(path: Path, limit: int | None = None, notes: Notes | None = None) -> Iterator[TraceRow]:
    """Streams the rows of a trace, plain or gzip, in constant memory.

    Args:
        path: the CSV file.
        limit: stop after that many rows.
        notes: told what should be known about the file.

    Raises:
        TraceError: missing, empty or garbled file, rows out of order (line 0: the file itself).
    """
    rows = _rows(path, lines(path, notes))
    yield from rows if limit is None else itertools.islice(rows, limit)


def _rows(path: Path, numbered: Iterator[tuple[int, str]]) -> Iterator[TraceRow]:
    first: int | None = None
    last = 0
    number, text = next(numbered, (1, None))
    if text is None:
        raise TraceError(path, 1, f"file is empty, expected the header {','.join(HEADER)}")
    header = cells(path, number, text)
    if tuple(name.strip() for name in header) != HEADER:
        raise TraceError(path, number, f"expected the header {','.join(HEADER)}, found {shown(header)}")
    for number, text in numbered:
        row = cells(path, number, text)
        ticks, context, generated = _parsed(path, number, row)
        if first is None:
            first = ticks
        elif ticks < last:
            raise TraceError(path, number, f"timestamp {row[0]!r} is earlier than the row before it")
        last = ticks
        yield TraceRow((ticks - first) / _TICKS_PER_S, context, generated)
    if first is None:
        raise TraceError(path, number, "no rows after the header")


def _parsed(path: Path, number: int, row: Sequence[str]) -> tuple[int, int, int]:
    if len(row) != len(HEADER):
        raise TraceError(path, number, f"expected {len(HEADER)} fields, found {len(row)}: {shown(row)}")
    try:
        ticks = stamp_ticks(row[0])
    except ValueError:
        raise TraceError(path, number, f"TIMESTAMP is not a date and time: {shown(row[:1])}") from None
    counts = []
    for name, cell in zip(HEADER[1:], row[1:], strict=True):
        if _COUNT.fullmatch(cell.strip()) is None:
            raise TraceError(path, number, f"{name} is not a token count: {shown([cell])}")
        counts.append(int(cell))
    return ticks, counts[0], counts[1]

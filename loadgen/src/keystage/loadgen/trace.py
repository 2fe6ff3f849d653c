"""Reads request traces: the Azure LLM 2023 CSV, row by row.

First in the flow of a replay: its rows give arrival times (`arrivals`) and token lengths
(`lengths`). It reads files and nothing else: it draws no random numbers and knows no clock.
Other parts (the simulator) import it too.

Format: a header `TIMESTAMP,ContextTokens,GeneratedTokens` and one row per request. Two forms of
timestamp are published: `2023-11-16 18:17:03.9799600` (seven fractional digits, no zone; taken
as UTC) and ISO 8601 with `T` or a blank, any fraction, and a zone (`+00:00`, `Z`).

Source of the data: Patel et al., "Splitwise", ISCA 2024; Azure/AzurePublicDataset, CC-BY-4.0.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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


class TraceError(Exception):
    """A trace that cannot be used: names file, line and what was found there."""

    def __init__(self, path: Path, line: int, found: str) -> None:
        super().__init__(f"trace {path}, line {line}: {found}")
        self.path = path
        self.line = line
        self.found = found


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


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace looks like.

    Attributes:
        rows: number of requests.
        span_s: seconds from the first to the last.
        rate_rps: arrivals per second, (rows - 1) / span.
        cv: coefficient of variation of the rows - 1 inter-arrival times.
        context_tokens: (probability, tokens) pairs.
        generated_tokens: (probability, tokens) pairs.
    """

    rows: int
    span_s: float
    rate_rps: float
    cv: float
    context_tokens: tuple[tuple[float, int], ...]
    generated_tokens: tuple[tuple[float, int], ...]


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
    moment = dt.datetime.fromisoformat(f"{date}T{clock}{zone}")
    seconds = (moment - _EPOCH) // dt.timedelta(seconds=1)
    return seconds * _TICKS_PER_S + int((fraction or "0").ljust(7, "0")[:7])


def read(path: Path, limit: int | None = None) -> Iterator[TraceRow]:
    """Streams the rows of a trace in constant memory.

    Args:
        path: the CSV file.
        limit: stop after that many rows.

    Raises:
        TraceError: missing, empty or garbled file, rows out of order (line 0: the file itself).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = _rows(path, csv.reader(file))
            yield from rows if limit is None else itertools.islice(rows, limit)
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(path, 0, f"is not text: {error}") from error


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[TraceRow]:
    first: int | None = None
    last = 0
    number = 0
    try:
        header = next(lines, None)
        if header is None:
            raise TraceError(path, 1, f"file is empty, expected the header {','.join(HEADER)}")
        if tuple(name.strip() for name in header) != HEADER:
            raise TraceError(path, 1, f"expected the header {','.join(HEADER)}, found {_shown(header)}")
        for number, cells in enumerate(lines, start=2):
            if not cells:
                continue
            ticks, context, generated = _parsed(path, number, cells)
            if first is None:
                first = ticks
            elif ticks < last:
                raise TraceError(path, number, f"timestamp {cells[0]!r} is earlier than the row before it")
            last = ticks
            yield TraceRow((ticks - first) / _TICKS_PER_S, context, generated)
    except csv.Error as error:
        raise TraceError(path, number + 1, f"is not CSV: {error}") from error
    if first is None:
        raise TraceError(path, max(number, 1), "no rows after the header")


def _parsed(path: Path, number: int, cells: Sequence[str]) -> tuple[int, int, int]:
    if len(cells) != len(HEADER):
        raise TraceError(path, number, f"expected {len(HEADER)} fields, found {len(cells)}: {_shown(cells)}")
    try:
        ticks = stamp_ticks(cells[0])
    except ValueError:
        raise TraceError(path, number, f"TIMESTAMP is not a date and time: {_shown(cells[:1])}") from None
    counts = []
    for name, cell in zip(HEADER[1:], cells[1:], strict=True):
        if _COUNT.fullmatch(cell.strip()) is None:
            raise TraceError(path, number, f"{name} is not a token count: {_shown([cell])}")
        counts.append(int(cell))
    return ticks, counts[0], counts[1]


def _shown(cells: Sequence[str]) -> str:
    text = ",".join(cells)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def summary(rows: Iterable[TraceRow]) -> TraceSummary:
    """Describes a trace: rate, CV of inter-arrival times, token quantiles.

    Raises:
        ValueError: with fewer than two rows, which have no inter-arrival time.
    """
    kept = list(rows)
    if len(kept) < 2:
        raise ValueError(f"a summary needs at least 2 rows, found {len(kept)}")
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(kept)]
    span_s = kept[-1].at_s - kept[0].at_s
    mean = span_s / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    return TraceSummary(
        rows=len(kept),
        span_s=span_s,
        rate_rps=1.0 / mean if mean > 0 else math.inf,
        cv=math.sqrt(variance) / mean if mean > 0 else 0.0,
        context_tokens=_quantiles(sorted(row.context_tokens for row in kept)),
        generated_tokens=_quantiles(sorted(row.generated_tokens for row in kept)),
    )


def _quantiles(ordered: Sequence[int]) -> tuple[tuple[float, int], ...]:
    count = len(ordered)
    return tuple((p, ordered[max(math.ceil(p * count) - 1, 0)]) for p in QUANTILE_PROBABILITIES)

"""Reads a day of the Azure Functions 2019 trace: counts by function and minute.

Header `HashOwner,HashApp,HashFunction,Trigger` (in any order) and minute columns `1`..`1440` or an
unbroken part of them, as `480`..`959`; the trace starts where its first column does. Durations and
memory come from the files beside it (`joined`): a duration is drawn for each invocation from the
function's percentiles (straight lines between them), the memory is its app's average.

Source: Shahrad et al., "Serverless in the Wild", USENIX ATC 2020; Azure/AzurePublicDataset.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keystage.loadgen.trace_lines import TraceError, cells, lines, shown
from keystage.loadgen.traces import within as placing
from keystage.loadgen.traces.counts import CountStore
from keystage.loadgen.traces.joined import PROBABILITIES, read_durations, read_memory, unknown
from keystage.loadgen.traces.model import (
    ATTRIBUTION,
    Block,
    Facts,
    Floats,
    Function,
    FunctionTable,
    Ints,
    Selection,
)

NAMES = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MINUTES_OF_DAY = 1440
MAX_PER_MINUTE = 10_000_000
"""Invocations of a minute, of one function and of all that are selected: 170,000 a second."""

_COUNT = re.compile(r"\d+", re.ASCII)
_PROBABILITIES = np.array(PROBABILITIES)


class FunctionCounts:
    """A source of the 2019 format.

    Args:
        path: the file of counts.
        durations: the file of durations of the same day.
        memory: the file of memory of the same day.

    Raises:
        TraceError: a header that is not the format's, or an unusable durations or memory file.
    """

    def __init__(self, path: Path, durations: Path | None = None, memory: Path | None = None) -> None:
        self.path = path
        self._places, first, self._minutes = read_header(path)
        self.facts = Facts("azure-functions-2019", ATTRIBUTION["azure-functions-2019"], first, self._minutes)
        self._first = first
        self._durations = None if durations is None else read_durations(durations, self.facts.notes)
        self._memory = None if memory is None else read_memory(memory, self.facts.notes)

    def totals(self, selection: Selection) -> dict[str, int]:
        """Invocations by function in the minutes that the window touches."""
        table = FunctionTable(self.path, selection)
        low, high = self._window(selection)
        found: Counter[str] = Counter()
        for function, counts in self._rows():
            if table.add(function) >= 0:
                found[function.name] += int(counts[low:high].sum())
        table.check_met()
        return found

    def blocks(self, selection: Selection, within: str, seed: int) -> Iterator[Block]:
        """A block a minute, of the minutes that the window touches."""
        cv = placing.parse_within(within)
        table = FunctionTable(self.path, selection)
        low, high = self._window(selection)
        seen: Counter[str] = Counter()
        keys: list[int] = []
        try:
            with CountStore(self._minutes) as store:
                for function, counts in self._rows():
                    occurrence = seen[function.name]
                    seen[function.name] += 1
                    code = table.add(function)
                    if code >= 0:
                        keys.append(placing.key(seed, function.name, occurrence))
                        counts[:low] = counts[high:] = 0
                        store.add(code, counts)
                table.check_met()
                self._note_repeated(seen)
                durations = self._percentiles(table.functions)
                yield from self._placed(store, table.functions, np.array(keys, np.uint64), durations, cv)
        except OSError as error:
            raise TraceError(
                self.path, 0, f"cannot be sorted by minute in a temporary file: {error}"
            ) from error

    def _placed(
        self,
        store: CountStore,
        functions: list[Function],
        keys: np.typing.NDArray[np.uint64],
        durations: Floats | None,
        cv: float | None,
    ) -> Iterator[Block]:
        for index, rows, counts in store.by_minute():
            total = int(counts.sum())
            minute = self._first + index
            if total > MAX_PER_MINUTE:
                raise TraceError(
                    self.path, 0,
                    f"minute {minute} has {total} invocations of the functions selected, "
                    f"at most {MAX_PER_MINUTE} can be placed",
                )  # fmt: skip
            times = placing.place(keys[rows], counts, minute, cv)
            order = np.argsort(times, kind="stable")
            codes = np.repeat(rows, counts)[order]
            drawn = None
            if durations is not None:
                shares = placing.draws(keys[rows], counts, minute)
                drawn = _quantiles(durations[np.repeat(rows, counts)], shares)[order]
            yield Block(functions, placing.in_minute(times[order], placing.MINUTE_S * index), codes, drawn)

    def _rows(self) -> Iterator[tuple[Function, Ints]]:
        numbered = lines(self.path, self.facts.notes)
        line, _ = next(numbered, (1, ""))
        has_rows = False
        for line, text in numbered:
            has_rows = True
            names, counts = self._parsed(line, text)
            app, function = names["HashApp"], names["HashFunction"]
            for column in ("HashApp", "HashFunction"):
                if not names[column] or not names[column].isprintable():
                    raise TraceError(self.path, line, f"{column} is no name: {shown([names[column]])}")
            memory_mb = None if self._memory is None else self._memory.get(app)
            yield Function(f"{app}/{function}", app, names["Trigger"], memory_mb), counts
        if not has_rows:
            raise TraceError(self.path, line, "no rows after the header")

    def _parsed(self, line: int, text: str) -> tuple[dict[str, str], Ints]:
        fields = text.split(",", len(NAMES))
        counts = None
        if len(fields) == len(NAMES) + 1 and '"' not in text:
            counts = _quick_counts(fields[-1], self._minutes)
        if counts is None:
            fields = cells(self.path, line, text)
            counts = self._careful_counts(line, fields)
        return {name: fields[place].strip() for name, place in self._places.items()}, counts

    def _careful_counts(self, line: int, fields: list[str]) -> Ints:
        """Reads cell by cell, so as to name the one that is wrong."""
        expected = len(NAMES) + self._minutes
        if len(fields) != expected:
            last = self._first + self._minutes - 1
            raise TraceError(
                self.path, line,
                f"expected {expected} fields (4 names, minutes {self._first}..{last}), "
                f"found {len(fields)}: {shown(fields)}",
            )  # fmt: skip
        counts = np.zeros(self._minutes, np.int64)
        for index, cell in enumerate(fields[len(NAMES) :]):
            name = f"minute {self._first + index}"
            if _COUNT.fullmatch(cell.strip()) is None:
                raise TraceError(self.path, line, f"{name} is not a count of invocations: {shown([cell])}")
            if len(cell) > 18 or int(cell) > MAX_PER_MINUTE:
                raise TraceError(self.path, line, f"{name}: at most {MAX_PER_MINUTE}, found {shown([cell])}")
            counts[index] = int(cell)
        return counts

    def _window(self, selection: Selection) -> tuple[int, int]:
        low = min(math.floor(selection.from_s / placing.MINUTE_S), self._minutes)
        if selection.to_s is None:
            return low, self._minutes
        return low, min(math.ceil(selection.to_s / placing.MINUTE_S), self._minutes)

    def _percentiles(self, functions: list[Function]) -> Floats | None:
        if self._durations is None:
            return None
        names = [(function.app, function.name[len(function.app) + 1 :]) for function in functions]
        lacking = sum(name not in self._durations for name in names)
        if lacking:
            self.facts.notes["no durations"] = (
                f"{lacking} of {len(names)} functions have no row in the durations file; theirs are unknown"
            )
        rows = [self._durations.get(name, unknown()) for name in names]
        return np.array(rows, np.float64).reshape(len(names), len(PROBABILITIES))

    def _note_repeated(self, seen: Counter[str]) -> None:
        repeated = sum(count > 1 for count in seen.values())
        if repeated:
            self.facts.notes["repeated"] = f"{repeated} functions have more than one row; their counts add up"


def read_header(path: Path) -> tuple[dict[str, int], int, int]:
    """(column of each name, first minute, number of minutes).

    Raises:
        TraceError: empty, other names, minutes that are missing, broken or outside 1..1440.
    """
    line, text = next(lines(path), (1, None))
    if text is None:
        raise TraceError(path, 1, f"file is empty, expected the header {','.join(NAMES)},1,...,1440")
    header = [name.strip() for name in cells(path, line, text)]
    if sorted(header[: len(NAMES)]) != sorted(NAMES):
        raise TraceError(
            path, line, f"expected the header {','.join(NAMES)},1,...,1440, found {shown(header)}"
        )
    minutes = header[len(NAMES) :]
    if not minutes:
        raise TraceError(path, line, "the header has no minute columns, expected 1..1440 or a part of them")
    for before, name in zip((None, *minutes), minutes, strict=False):
        number = int(name) if re.fullmatch(r"[1-9]\d{0,3}", name, re.ASCII) else 0
        if not 1 <= number <= MINUTES_OF_DAY:
            raise TraceError(path, line, f"minute columns are 1..{MINUTES_OF_DAY}, found {shown([name])}")
        if before is not None and number != int(before) + 1:
            raise TraceError(
                path, line, f"minute column {int(before) + 1} is missing: after {before} comes {name}"
            )
    places = {name: header.index(name) for name in NAMES}
    return places, int(minutes[0]), len(minutes)


def _quick_counts(text: str, minutes: int) -> Ints | None:
    """The counts of a line in plain form; None to have it read with care."""
    if text.encode().translate(None, b"0123456789,") or text.count(",") != minutes - 1:
        return None
    if ",," in text or text.startswith(",") or text.endswith(",") or not text:
        return None
    counts = np.fromstring(text, np.int64, sep=",")
    return counts if len(counts) == minutes and counts.max() <= MAX_PER_MINUTE else None


def _quantiles(percentiles: Floats, shares: Floats) -> Floats:
    """Inverse distribution function of each row at its share: shapes (n, 7) and (n,)."""
    right = np.clip(np.searchsorted(_PROBABILITIES, shares, side="right"), 1, len(_PROBABILITIES) - 1)
    left = right - 1
    rows = np.arange(len(shares))
    low, high = percentiles[rows, left], percentiles[rows, right]
    part = (shares - _PROBABILITIES[left]) / (_PROBABILITIES[right] - _PROBABILITIES[left])
    drawn: Floats = low + (high - low) * part
    return drawn

"""Formats with a row an invocation: the 2021 functions, LLM requests, Mooncake.

A parser gives rows one by one; `in_order` puts small disorder right within BUFFERED rows and says
so, and refuses more than that. Azure LLM files are refused at the first row out of order.

Sources: Zhang et al., "Faster and Cheaper Serverless Computing on Harvested Resources", SOSP 2021
(rows are ordered by start = end - duration, times are seconds of the file's own clock from 0);
Qin et al., "Mooncake", FAST 2025 (milliseconds from the start).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from keystage.loadgen import trace
from keystage.loadgen.trace_lines import Notes, TraceError, cells, lines, number_in, shown
from keystage.loadgen.traces.model import (
    ATTRIBUTION,
    Block,
    Facts,
    Function,
    FunctionTable,
    Selection,
)

BUFFERED = 8192
"""Rows that may lie between a row and its place."""

FUNCTIONS_HEADER = ("app", "func", "end_timestamp", "duration")
MAX_TIME_S = 1e10
MAX_DURATION_S = 1e8
MAX_TOKENS = 10**9

_Row = tuple[float, int, int, float, int, int]
_ROW = np.dtype([
    ("at_s", np.float64), ("line", np.int64), ("function", np.int32),
    ("duration_s", np.float64), ("context", np.int64), ("generated", np.int64),
])  # fmt: skip
_Rows = npt.NDArray[np.void]


class FunctionEvents:
    """A source of the 2021 format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = Facts("azure-functions-2021", ATTRIBUTION["azure-functions-2021"])

    def totals(self, selection: Selection) -> dict[str, int]:
        """Invocations by function in the window."""
        found: Counter[str] = Counter()
        for block in self.blocks(selection, "", 0):
            part = block.part(selection.from_s, np.inf if selection.to_s is None else selection.to_s)
            for code, count in zip(*np.unique(part.function, return_counts=True), strict=True):
                found[part.functions[code].name] += int(count)
        return found

    def blocks(self, selection: Selection, within: str, seed: int) -> Iterator[Block]:
        """Blocks of BUFFERED rows."""
        table = FunctionTable(self.path, selection)
        for rows in in_order(self.path, self._rows(table), self.facts.notes):
            yield Block(table.functions, rows["at_s"], rows["function"], rows["duration_s"])
            if selection.to_s is not None and rows["at_s"][-1] >= selection.to_s:
                return
        table.check_met()

    def _rows(self, table: FunctionTable) -> Iterator[_Row]:
        path, notes = self.path, self.facts.notes
        numbered = lines(path, notes)
        line, text = next(numbered, (1, None))
        if text is None:
            raise TraceError(path, 1, f"file is empty, expected the header {','.join(FUNCTIONS_HEADER)}")
        header = cells(path, line, text)
        if tuple(name.strip() for name in header) != FUNCTIONS_HEADER:
            expected = ",".join(FUNCTIONS_HEADER)
            raise TraceError(path, line, f"expected the header {expected}, found {shown(header)}")
        codes: dict[tuple[str, str], int] = {}
        has_rows, early = False, 0
        for line, text in numbered:
            has_rows = True
            row = cells(path, line, text)
            if len(row) != len(FUNCTIONS_HEADER):
                raise TraceError(
                    path, line, f"expected {len(FUNCTIONS_HEADER)} fields, found {len(row)}: {shown(row)}"
                )
            code = codes.get((row[0], row[1]))
            if code is None:
                code = codes[row[0], row[1]] = table.add(_function(path, line, row))
            end_s = number_in(path, line, "end_timestamp", row[2], MAX_TIME_S)
            duration_s = number_in(path, line, "duration", row[3], MAX_DURATION_S)
            start_s = end_s - duration_s
            if start_s < 0:
                early += 1
                start_s = 0.0
                notes["early"] = f"{early} invocations began before time 0; their start was set to 0"
            if code >= 0:
                yield start_s, line, code, duration_s, 0, 0
        if not has_rows:
            raise TraceError(path, line, "no rows after the header")


def _function(path: Path, line: int, row: list[str]) -> Function:
    for name, cell in zip(FUNCTIONS_HEADER, row[:2], strict=False):
        if not cell.strip() or not cell.isprintable():
            raise TraceError(path, line, f"{name} is no name: {shown([cell])}")
    app, func = row[0].strip(), row[1].strip()
    return Function(f"{app}/{func}", app)


class Requests:
    """A source of LLM requests: Azure 2023 and 2024, or Mooncake."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.facts = Facts(kind, ATTRIBUTION[kind])
        parsers: dict[str, Callable[[Path, Notes], Iterator[_Row]]] = {
            "azure-llm": _azure_rows,
            "mooncake": _mooncake_rows,
        }
        self._parser = parsers[kind]

    def totals(self, selection: Selection) -> dict[str, int]:
        """Never asked: there are no functions to choose from."""
        self._check(selection)
        return {}

    def blocks(self, selection: Selection, within: str, seed: int) -> Iterator[Block]:
        """Blocks of BUFFERED rows."""
        self._check(selection)
        functions = [Function("", "")]
        for rows in in_order(self.path, self._parser(self.path, self.facts.notes), self.facts.notes):
            yield Block(functions, rows["at_s"], rows["function"], None, rows["context"], rows["generated"])
            if selection.to_s is not None and rows["at_s"][-1] >= selection.to_s:
                return

    def _check(self, selection: Selection) -> None:
        if selection.is_by_function:
            raise TraceError(self.path, 0, "is a trace of LLM requests: it has no functions to select by")


def _azure_rows(path: Path, notes: Notes) -> Iterator[_Row]:
    for row in trace.read(path, notes=notes):
        yield row.at_s, 0, 0, 0.0, row.context_tokens, row.generated_tokens


class _Request(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_TIME_S)]
    input_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[int] | None = None


def _mooncake_rows(path: Path, notes: Notes) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(_Request)
    line = 0
    for line, text in lines(path, notes):
        try:
            row = decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TraceError(path, line, f"is not a request: {error}; found {shown([text])}") from error
        yield row.timestamp / 1000, line, 0, 0.0, row.input_length, row.output_length
    if not line:
        raise TraceError(path, 1, "file is empty, expected a JSON object a line")


def in_order(path: Path, rows: Iterator[_Row], notes: Notes, buffered: int = BUFFERED) -> Iterator[_Rows]:
    """Blocks of rows, ascending in time; rows at one time keep the file's order.

    Any row at most `buffered` rows from its place is put there; how many were moved is noted.

    Raises:
        TraceError: a row that belongs before one handed on already, with its line.
    """
    held: _Rows = np.empty(0, _ROW)
    handed_s = latest_s = -np.inf
    moved, most_s = 0, 0.0
    while chunk := list(itertools.islice(rows, buffered)):
        new = np.array(chunk, _ROW)
        too_late = np.flatnonzero(new["at_s"] < handed_s)
        if len(too_late):
            row = new[too_late[0]]
            raise TraceError(
                path, int(row["line"]),
                f"starts at {row['at_s']:.6f} s, more than {buffered} rows after its place "
                f"(rows up to {handed_s:.6f} s came before); sort the file by start",
            )  # fmt: skip
        before = np.maximum.accumulate(np.concatenate(([latest_s], new["at_s"])))
        latest_s = float(before[-1])
        late_s = before[:-1] - new["at_s"]
        if (late_s > 0).any():
            moved += int((late_s > 0).sum())
            most_s = max(most_s, float(late_s.max()))
            notes["order"] = f"{moved} rows were out of order by up to {most_s:.6f} s and were put in order"
        both = np.concatenate((held, new))
        both = both[np.argsort(both["at_s"], kind="stable")]
        split = max(len(both) - buffered, 0)
        ready, held = both[:split], both[split:]
        if len(ready):
            handed_s = float(ready["at_s"][-1])
            yield ready
    if len(held):
        yield held

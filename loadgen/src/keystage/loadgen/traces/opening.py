"""Opens a trace: finds out its format, chooses what is selected, takes blocks apart.

The format is told by the first line alone, never by the file's name.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from keystage.loadgen import trace
from keystage.loadgen.trace_lines import TraceError, cells, lines, shown
from keystage.loadgen.traces import functions_2019
from keystage.loadgen.traces import within as placing
from keystage.loadgen.traces.events import FUNCTIONS_HEADER, FunctionEvents, Requests
from keystage.loadgen.traces.functions_2019 import FunctionCounts
from keystage.loadgen.traces.model import KINDS, Block, Facts, Invocation, Selection, Source

POISSON = "poisson"


class Trace:
    """A trace file and how to read it; reading starts anew with each call.

    Attributes:
        kind: one of KINDS.
        path: the file.
        facts: what is known without the rows, and the notes of opening and of the latest pass.
    """

    def __init__(self, source: Source) -> None:
        self.kind = source.facts.kind
        self.path = source.path
        self.facts: Facts = source.facts
        self._source = source
        self._notes_of_opening = dict(source.facts.notes)

    @property
    def span_s(self) -> float | None:
        """Length that the columns state (2019); None where only the rows know."""
        return None if self.facts.minutes is None else placing.MINUTE_S * self.facts.minutes

    def blocks(
        self, selection: Selection | None = None, *, within: str = POISSON, seed: int = 0
    ) -> Iterator[Block]:
        """As `invocations`, in columns: for whole days, and for counting.

        Raises:
            ValueError: an unknown `within`, at once; a seed below 0.
            TraceError: while reading.
        """
        placing.parse_within(within)
        if seed < 0:
            raise ValueError(f"a seed must be at least 0, got {seed}")
        return self._blocks(selection or Selection(), within, seed)

    def _blocks(self, selection: Selection, within: str, seed: int) -> Iterator[Block]:
        self.facts.notes.clear()
        self.facts.notes.update(self._notes_of_opening)
        if selection.top is not None:
            names = most(self._source.totals(selection), selection.top)
            if not names:
                return
            selection = dataclasses.replace(selection, functions=names, top=None)
        to_s = math.inf if selection.to_s is None else selection.to_s
        for block in self._source.blocks(selection, within, seed):
            part = block.part(selection.from_s, to_s)
            if len(part.at_s):
                yield part

    def invocations(
        self, selection: Selection | None = None, *, within: str = POISSON, seed: int = 0
    ) -> Iterator[Invocation]:
        """Streams the selected invocations, ascending in time.

        Memory holds the functions, and of the file a bounded buffer (events.BUFFERED rows,
        counts.BUFFERED counts) and the invocations of one minute.

        Args:
            selection: which; all by default. Asking for the top functions reads the file twice.
            within: how counts per minute become arrivals (2019): poisson, uniform or gamma:CV;
                formats with a time in each row have no use for it.
            seed: of those arrivals and of durations drawn, at least 0. A function's arrivals do
                not depend on what else is selected.

        Raises:
            ValueError: an unknown `within`, at once; a seed below 0.
            TraceError: while reading: a file that cannot be used, a name that is not in it.
        """
        return itertools.chain.from_iterable(
            map(_taken_apart, self.blocks(selection, within=within, seed=seed))
        )


def _taken_apart(block: Block) -> Iterator[Invocation]:
    count = len(block.at_s)
    nothing = [None] * count
    durations = nothing if block.duration_s is None else map(_known, block.duration_s.tolist())
    contexts = nothing if block.context_tokens is None else block.context_tokens.tolist()
    generated = nothing if block.generated_tokens is None else block.generated_tokens.tolist()
    functions = block.functions
    for at_s, code, duration_s, context, answer in zip(
        block.at_s.tolist(), block.function.tolist(), durations, contexts, generated, strict=True
    ):
        function = functions[code]
        yield Invocation(
            at_s,
            function.name,
            function.app,
            function.trigger,
            duration_s,
            function.memory_mb,
            context,
            answer,
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def most(totals: dict[str, int], count: int) -> tuple[str, ...]:
    """Names of the largest totals above 0, of equal ones the first by name."""
    ranked = sorted((name for name, total in totals.items() if total), key=lambda name: (-totals[name], name))
    return tuple(ranked[:count])


def detect(path: Path) -> str:
    """The format of a file, one of KINDS.

    Raises:
        TraceError: unreadable, empty, or none of the formats.
    """
    line, text = next(lines(path), (1, None))
    if text is None:
        raise TraceError(path, 1, f"file is empty, expected one of {', '.join(KINDS)}")
    if text.lstrip().startswith("{"):
        return "mooncake"
    header = tuple(name.strip() for name in cells(path, line, text))
    if header == trace.HEADER:
        return "azure-llm"
    if header == FUNCTIONS_HEADER:
        return "azure-functions-2021"
    if collections.Counter(header[: len(functions_2019.NAMES)]) == collections.Counter(functions_2019.NAMES):
        return "azure-functions-2019"
    hint = ""
    if "HashApp" in header:
        hint = " (durations and memory are joined to the file of invocations)"
    raise TraceError(path, line, f"is none of {', '.join(KINDS)}{hint}: it starts with {shown([text])}")


def open_trace(
    path: Path, *, kind: str | None = None, durations: Path | None = None, memory: Path | None = None
) -> Trace:
    """Opens a trace; of the rows none is read yet, but the durations and memory files are.

    Args:
        path: the file, plain or gzip.
        kind: one of KINDS; found out if None.
        durations: 2019: the file of durations beside it.
        memory: 2019: the file of memory beside it.

    Raises:
        TraceError: a file that cannot be used, or joined files that the format does not have.
    """
    kind = detect(path) if kind is None else kind
    if kind == "azure-functions-2019":
        return Trace(FunctionCounts(path, durations, memory))
    for joined in (durations, memory):
        if joined is not None:
            raise TraceError(joined, 0, f"can be joined to azure-functions-2019 only, {path.name} is {kind}")
    if kind == "azure-functions-2021":
        return Trace(FunctionEvents(path))
    if kind in KINDS:
        return Trace(Requests(path, kind))
    raise TraceError(path, 0, f"kind must be one of {', '.join(KINDS)}, got {kind!r}")

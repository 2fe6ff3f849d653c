"""What a trace yields and how a part of it is chosen; no IO.

Readers hand on blocks (columns of many invocations), for a full day of the 2019 trace has a
thousand million of them; `Trace.invocations` takes the blocks apart into objects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keystage.loadgen.trace_lines import Notes, TraceError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS = ("azure-functions-2019", "azure-functions-2021", "azure-llm", "mooncake")

ATTRIBUTION = {
    "azure-functions-2019": "Shahrad et al., Serverless in the Wild, USENIX ATC 2020 (CC-BY-4.0)",
    "azure-functions-2021": "Zhang et al., Faster and Cheaper Serverless Computing on Harvested "
    "Resources, SOSP 2021 (CC-BY-4.0)",
    "azure-llm": "Patel et al., Splitwise, ISCA 2024; Stojkovic et al., DynamoLLM, HPCA 2025 (CC-BY-4.0)",
    "mooncake": "Qin et al., Mooncake, FAST 2025 (Apache-2.0)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """One invocation of a function, or one request to an LLM.

    Attributes:
        at_s: seconds from the start of the trace, or of the selected window.
        function: "app/func" as the file names them; "" in a trace of LLM requests.
        app: the function's app, "" likewise.
        trigger: what starts the function (2019 only), else "".
        duration_s: how long it ran; None where the file does not say.
        memory_mb: what its app has allocated on average; None where no file says.
        context_tokens: prompt length; None in a trace of functions.
        generated_tokens: answer length; None in a trace of functions.
    """

    at_s: float
    function: str
    app: str
    trigger: str
    duration_s: float | None = None
    memory_mb: float | None = None
    context_tokens: int | None = None
    generated_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which part of a trace is wanted; what is named must all hold.

    Attributes:
        functions: "app/func", or the func alone; empty for all.
        apps: names of apps; empty for all.
        triggers: names of triggers; empty for all.
        top: only the functions with the most invocations among these, within the window's minutes.
        from_s: start of the window, seconds from the start of the trace; times then count from here.
        to_s: end of the window, itself outside; None for the end of the trace.

    Raises:
        ValueError: a window that is empty or not finite, or a top below 1.
    """

    functions: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    top: int | None = None
    from_s: float = 0.0
    to_s: float | None = None

    def __post_init__(self) -> None:
        """Checks."""
        if self.top is not None and self.top < 1:
            raise ValueError(f"the number of top functions must be at least 1, got {self.top}")
        if not (math.isfinite(self.from_s) and self.from_s >= 0):
            raise ValueError(f"the window must start at 0 s or later, got {self.from_s:g}")
        if self.to_s is not None and not (math.isfinite(self.to_s) and self.to_s > self.from_s):
            raise ValueError(f"the window must end after its start at {self.from_s:g} s, got {self.to_s:g}")

    @property
    def is_by_function(self) -> bool:
        """Whether it needs a trace that has functions."""
        return bool(self.functions or self.apps or self.triggers or self.top)


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of a trace (or, in 2019, a row: a function there has one trigger a row).

    Attributes:
        name: "app/func".
        app: its app.
        trigger: its trigger, "" if the format has none.
        memory_mb: average memory of its app, if known.
    """

    name: str
    app: str
    trigger: str = ""
    memory_mb: float | None = None


@dataclasses.dataclass(slots=True)
class Facts:
    """What is known of a trace file without its rows.

    Attributes:
        kind: one of KINDS.
        attribution: whom to cite, and the data's licence.
        first_minute: 2019: number of the first minute column (1 is 00:00 to 00:01), else None.
        minutes: 2019: how many minute columns there are, else None.
        notes: repairs and peculiarities, by topic; complete after a pass over the file.
    """

    kind: str
    attribution: str
    first_minute: int | None = None
    minutes: int | None = None
    notes: Notes = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Block:
    """Columns of invocations, ascending in time.

    Attributes:
        functions: the table that `function` points into; it may grow with later blocks.
        at_s: times, shape (n,).
        function: index of each one's function, shape (n,).
        duration_s: seconds, NaN where unknown, shape (n,); None if the format has none.
        context_tokens: shape (n,), or None in a trace of functions.
        generated_tokens: likewise.
    """

    functions: list[Function]
    at_s: Floats
    function: npt.NDArray[np.int32]
    duration_s: Floats | None = None
    context_tokens: Ints | None = None
    generated_tokens: Ints | None = None

    def part(self, from_s: float, to_s: float) -> Block:
        """What lies in [from_s, to_s), its times counted from from_s."""
        low, high = np.searchsorted(self.at_s, (from_s, to_s), side="left")
        taken = slice(int(low), int(high))
        return Block(
            self.functions,
            self.at_s[taken] - from_s,
            self.function[taken],
            None if self.duration_s is None else self.duration_s[taken],
            None if self.context_tokens is None else self.context_tokens[taken],
            None if self.generated_tokens is None else self.generated_tokens[taken],
        )


class Source(Protocol):
    """A reader of one format."""

    path: Path
    facts: Facts

    def blocks(self, selection: Selection, within: str, seed: int) -> Iterator[Block]:
        """Streams what is selected (a window is a hint, `top` is not looked at), ascending, trace time."""

    def totals(self, selection: Selection) -> dict[str, int]:
        """Invocations by function name, in the minutes that the window touches."""


class FunctionTable:
    """The functions met so far, and whether they are selected."""

    def __init__(self, path: Path, selection: Selection) -> None:
        self.functions: list[Function] = []
        self._path = path
        self._selection = selection
        self._wanted = {
            "function": set(selection.functions),
            "app": set(selection.apps),
            "trigger": set(selection.triggers),
        }
        self._unmet = {kind: set(names) for kind, names in self._wanted.items()}

    def add(self, function: Function) -> int:
        """Index of a new function, -1 if it is not selected."""
        func = function.name[len(function.app) + 1 :]
        names = {"function": (function.name, func), "app": (function.app,)}
        is_wanted = True
        for kind, wanted in self._wanted.items():
            own = names.get(kind, (function.trigger,))
            self._unmet[kind].difference_update(own)
            is_wanted &= not wanted or any(name in wanted for name in own)
        if not is_wanted:
            return -1
        self.functions.append(function)
        return len(self.functions) - 1

    def check_met(self) -> None:
        """After the whole file: everything named must have been there.

        Raises:
            TraceError: a name that no row has.
        """
        for kind, names in self._unmet.items():
            if names:
                raise TraceError(self._path, 0, f"has no {kind} {min(names)!r}")

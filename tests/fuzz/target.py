"""What is fuzzed: a parser with its seeds, the refusals that it may answer with, and its bounds."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

Form: TypeAlias = Literal["json", "msgpack", "text", "bytes"]
"""How inputs are changed: as a tree of values, as text with numbers in it, as bytes."""
REGRESSIONS = Path(__file__).parent / "regressions"
INPUT_S = 5.0
"""Of processor time. A target that takes longer for one input hangs."""
GROWTH_BYTES = 256 << 20
"""Resident memory that may come over all inputs of a target; address space may grow by four times that."""
MOST_INPUT_BYTES = 1 << 16
UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a target's own decoding of its input may raise."""


class FuzzError(AssertionError):
    """What a target says of a result that is no refusal and cannot be right."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """A target whose modules are imported.

    Attributes:
        run: takes one input; what it raises beyond `refusals` is a crash.
        refusals: the documented answers to input that is wrong.
        seeds: inputs to begin with, most of them right.
        change: makes another input of one, None: as the target's form says.
    """

    run: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    seeds: tuple[bytes, ...]
    change: Callable[[bytes, random.Random], bytes] | None = None

    def answer(self, data: bytes) -> bool:
        """Runs one input; whether it was taken rather than refused."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One row of the table.

    Attributes:
        name: on the command line, and the folder of its corpus.
        place: `module:function` that imports what is fuzzed and gives a `Ready`; a folder of its own is
        passed.
        form: how inputs are changed.
        input_s: bound for one input, seconds of processor time.
        growth_bytes: see `GROWTH_BYTES`.
        words: tokens that mutations put in.
        is_forking: each input runs in a process of its own; without coverage.
        share: of the time; 1 for most.
    """

    name: str
    place: str
    form: Form
    input_s: float = INPUT_S
    growth_bytes: int = GROWTH_BYTES
    words: tuple[str, ...] = ()
    is_forking: bool = False
    share: int = 1

    def ready(self, scratch: Path) -> Ready:
        """Imports the modules under test."""
        module, _, function = self.place.partition(":")
        made: Any = getattr(importlib.import_module(module), function)(scratch)
        assert isinstance(made, Ready)
        return made

    def regressions(self) -> dict[str, bytes]:
        """Inputs that once were answered wrongly, by name."""
        folder = REGRESSIONS / self.name
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))} if folder.is_dir() else {}

"""The decisions log: one JSON line per tick, bounded in size, and its replay.

Before it: `loop` appends. After it: people, plots, and `keystage replay-decisions`, which runs the
policy again on every line. Each line carries settings, the state before, snapshot and decision, so
a replay can start anywhere, also after a rotation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keystage.controller.domain.decision import Decision
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings
from keystage.wire.unreadable import UNREADABLE


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        settings: the policy's settings; defaults are omitted on the line.
        before: the policy's state before.
        snapshot: what was seen.
        decision: what was decided, with the state after.
    """

    settings: PolicySettings = PolicySettings()
    before: PolicyState = PolicyState()
    snapshot: Snapshot
    decision: Decision


class DecisionLog:
    """Appends lines to a file; a full file becomes `<name>.1` and the one before that goes.

    Args:
        path: file of the newest lines.
        max_bytes: size from which it is put aside; twice this is kept in all.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def append(self, record: Record) -> None:
        """Writes one line.

        Raises:
            OSError: the file cannot be written.
        """
        line = msgspec.json.encode(record) + b"\n"
        if self._path.exists() and self._path.stat().st_size + len(line) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        # Deployments are in a snapshot, and their environment may be nobody else's business.
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "ab") as file:
            os.fchmod(fd, 0o600)
            file.write(line)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A line on which the replay differs, or that cannot be read.

    Attributes:
        line: line number, from 1.
        text: what is wrong with it.
    """

    line: int
    text: str


def replay(path: Path) -> tuple[int, list[Difference]]:
    """Runs the policy again on every line.

    Returns:
        How many lines there are, and those that differ or are garbled.

    Raises:
        OSError: the file cannot be read.
    """
    count, differences = 0, []
    with path.open("rb") as file:
        for count, line in enumerate(file, start=1):
            differences += [Difference(count, text) for text in _compare(line)]
    return count, differences


def _compare(line: bytes) -> Iterator[str]:
    try:
        record = msgspec.json.decode(line, type=Record)
    except UNREADABLE as error:
        yield f"not a decision: {error}"
        return
    try:
        again = decide(record.settings, record.snapshot, record.before)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers nobody logged
        yield f"cannot be decided again: {type(error).__name__}: {error}"
        return
    for field in Decision.__struct_fields__:
        logged, now = getattr(record.decision, field), getattr(again, field)
        if logged != now:
            yield f"{field}: logged {_short(logged)}, now {_short(now)}"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 400 else text[:400] + "..."

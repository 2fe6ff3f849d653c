"""What `keystage doctor` finds: one line a thing, with its bound and what it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
CODES: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        area: `machine`, `local`, `redis`, `gateway`, `kubernetes` or `openfaas`.
        level: `fail`: something will not work; `warn`: it works less well than it could, or may not.
        thing: what was looked at.
        bound: what is needed.
        actual: what there is.
        advice: the consequence and what to do; empty where all is well.
    """

    area: str
    level: Level
    thing: str
    bound: str
    actual: str
    advice: str = ""

    def __str__(self) -> str:
        end = f": {self.advice}" if self.advice else ""
        return f"{self.level:4} {self.area}: {self.thing}: needed {self.bound}, found {self.actual}{end}"


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What `keystage doctor --json` prints.

    Attributes:
        is_well: nothing but `ok`.
        counts: of each level.
        checks: in the order in which things were looked at.
    """

    is_well: bool
    counts: dict[Level, int]
    checks: tuple[Check, ...]


def findings(checks: Sequence[Check]) -> Findings:
    """The checks with how many there are of each level."""
    counts = {level: sum(check.level == level for check in checks) for level in CODES}
    return Findings(is_well=counts["ok"] == len(checks), counts=counts, checks=tuple(checks))


def judged(
    area: str, thing: str, bound: str, actual: str, level: Level, advice: str, *, is_met: bool
) -> Check:
    """A check that is `ok` without advice where the bound is met, else of the level given."""
    if is_met:
        return Check(area=area, level="ok", thing=thing, bound=bound, actual=actual)
    return Check(area=area, level=level, thing=thing, bound=bound, actual=actual, advice=advice)


def exit_code(checks: Iterable[Check]) -> int:
    """0 where all is well, 1 with warnings, 2 with failures."""
    return max((CODES[check.level] for check in checks), default=0)


def text(checks: Sequence[Check]) -> str:
    """All lines, the worst last, and a count."""
    ordered = sorted(checks, key=lambda check: CODES[check.level])
    counts = ", ".join(f"{count} {level}" for level, count in findings(checks).counts.items())
    return "\n".join([*map(str, ordered), counts])

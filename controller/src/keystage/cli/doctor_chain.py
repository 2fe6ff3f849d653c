"""Time-outs on a request's way, the outermost first: which is the shortest, and whether it is the right one.

Each one on the way must wait at least as long as everything behind it, so that the innermost answers about
being late (docs/gateway.md). Pure: who waits how long comes from `doctor_gateway` and `doctor_cluster`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keystage.cli.doctor_report import Check


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One who waits.

    Attributes:
        who: as `the gateway`.
        setting: what sets it.
        seconds: how long.
        is_known: whether that was read, not taken for its default.
    """

    who: str
    setting: str
    seconds: float
    is_known: bool = True

    def __str__(self) -> str:
        default = "" if self.is_known else " (unless it was changed)"
        return f"{self.setting} {self.seconds:g} s of {self.who}{default}"


def check(area: str, name: str, outer: Sequence[Link], own: Sequence[Link]) -> Check:
    """The way to one function.

    Args:
        area: of the check.
        name: of the function.
        outer: who waits in front of it, the outermost first; at least one.
        own: its own settings.
    """
    way = [*outer, *own]
    shortest = min(reversed(way), key=lambda link: link.seconds)
    late = [
        (link, behind)
        for place, link in enumerate(outer)
        if (behind := max(way[place + 1 :], key=lambda one: one.seconds, default=link)).seconds > link.seconds
    ]
    return Check(
        area=area,
        level="warn" if late else "ok",
        thing=f"time-outs of {name}",
        bound="each at least as long as those behind it",
        actual=f"the shortest is {shortest}; on the way: {', '.join(map(str, way))}",
        advice="; ".join(_cure(*pair) for pair in late),
    )


def _cure(link: Link, behind: Link) -> str:
    return (
        f"{link.who} gives up first, and the client gets 504 instead of the answer: raise {link.setting} to "
        f"{behind.seconds:g} s or more, or lower {behind.setting} of {behind.who} to {link.seconds:g} s"
    )

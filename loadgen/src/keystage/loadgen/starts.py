"""How long replicas took from the controller's decision to their first item of work, by kind of start.

Comes after a replay: whoever runs the system hands over what it noted of every start. `report` holds
it, `table` shows it. Pure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaStart:
    """One start; times in seconds since it was decided, None for what did not happen (yet).

    Attributes:
        replica: name.
        function: function name.
        via: `standby`, `holder`, `fork-server` or `process`; empty while it has not begun.
        source: where its parameters came from, empty: it read them itself.
        note: why it was not started in a better way.
        decided_s: when it was decided, seconds since the idle system began to be measured.
        forked_s: its process ran.
        mapped_s: its parameters were in memory.
        forward_s: its first forward pass was done.
        ready_s: it welcomed work.
        first_item_s: its first item of work was computed.
    """

    replica: str
    function: str
    via: str
    source: str
    note: str
    decided_s: float
    forked_s: float | None
    mapped_s: float | None
    forward_s: float | None
    ready_s: float | None
    first_item_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class StartSummary:
    """Starts of one kind: medians and maxima over those that got so far.

    Attributes:
        via: the kind.
        count: starts.
        ready_median_s: decision to ready.
        ready_max_s: likewise.
        answered: how many did work.
        first_item_median_s: decision to first item of work.
        first_item_max_s: likewise.
    """

    via: str
    count: int
    ready_median_s: float | None
    ready_max_s: float | None
    answered: int
    first_item_median_s: float | None
    first_item_max_s: float | None


def summaries(starts: Sequence[ReplicaStart]) -> list[StartSummary]:
    """One line per kind of start, in alphabetical order."""
    return [
        _summary(via, [s for s in starts if s.via == via]) for via in sorted({s.via for s in starts if s.via})
    ]


def _summary(via: str, starts: Sequence[ReplicaStart]) -> StartSummary:
    ready = [s.ready_s for s in starts if s.ready_s is not None]
    items = [s.first_item_s for s in starts if s.first_item_s is not None]
    return StartSummary(
        via=via,
        count=len(starts),
        ready_median_s=statistics.median(ready) if ready else None,
        ready_max_s=max(ready, default=None),
        answered=len(items),
        first_item_median_s=statistics.median(items) if items else None,
        first_item_max_s=max(items, default=None),
    )

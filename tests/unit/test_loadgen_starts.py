"""Start times by kind of start: medians, maxima, and what did not get so far."""

from __future__ import annotations

from keystage.loadgen.starts import ReplicaStart, StartSummary, summaries


def start(via: str, ready_s: float | None = None, first_item_s: float | None = None) -> ReplicaStart:
    return ReplicaStart("r", "f", via, "", "", 1.0, 0.01, 0.02, 0.03, ready_s, first_item_s)


def test_starts_are_summed_up_by_kind() -> None:
    starts = [
        start("process", 3.0, 5.0),
        start("holder", 0.1, 0.2),
        start("holder", 0.3, None),
        start("holder", None, None),
        start("holder", 0.2, 0.4),
        start(""),
    ]
    assert summaries(starts) == [
        StartSummary("holder", 4, 0.2, 0.3, 2, (0.2 + 0.4) / 2, 0.4),
        StartSummary("process", 1, 3.0, 3.0, 1, 5.0, 5.0),
    ]
    assert summaries([start("holder")]) == [StartSummary("holder", 1, None, None, 0, None, None)]
    assert summaries([]) == []

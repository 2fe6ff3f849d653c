"""What is kept of starts: the newest, in Unix seconds, with what the worker told."""

from __future__ import annotations

from keystage.local.starts import KEPT, Starts
from keystage.wire.starts import StartReport


def test_a_start_is_told_in_unix_seconds() -> None:
    starts = Starts(offset_s=1000.0)
    starts.wanted("f-0", "f", "a", 1005.0)
    starts.forked("f-0", 1007.0, via="holder", source="memory", note="n")
    starts.told("f-0", StartReport(begun_s=6.5, mapped_s=6.6, forward_s=6.7, ready_s=6.8))
    (record,) = starts.records()
    assert (record.replica, record.function, record.node) == ("f-0", "f", "a")
    assert (record.via, record.source, record.note) == ("holder", "memory", "n")
    # It ran before its forker's answer was heard, and has done no work yet.
    assert (record.wanted_at_s, record.forked_at_s, record.first_item_at_s) == (1005.0, 1006.5, 0.0)
    assert (record.mapped_at_s, record.forward_at_s, record.ready_at_s) == (1006.6, 1006.7, 1006.8)
    starts.told("f-0", StartReport(begun_s=8.0, first_item_s=9.0))
    (record,) = starts.records()
    assert (record.forked_at_s, record.first_item_at_s) == (1006.5, 1009.0)


def test_only_the_newest_are_kept_and_strangers_are_passed_over() -> None:
    starts = Starts(0.0)
    for n in range(KEPT + 5):
        starts.wanted(f"f-{n}", "f", "", float(n))
    starts.forked("f-0", 1.0, via="process")
    starts.told("f-1", StartReport(ready_s=1.0))
    assert [r.replica for r in starts.records()] == [f"f-{n}" for n in range(5, KEPT + 5)]
    assert {r.via for r in starts.records()} == {""}

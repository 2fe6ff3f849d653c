"""The board: the newest report, and who waits for the next."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from keystage.observability import board
from keystage.observability.api import Report
from keystage.observability.board import Board, NoReport, stamp_of


def body(number: int, controller: str = "a", at_s: float = 1.0) -> bytes:
    return msgspec.json.encode(Report(controller=controller, number=number, at_s=at_s))


def test_it_keeps_the_newest_of_one_controller() -> None:
    kept = Board()
    assert kept.newest(None) is None
    assert kept.put(body(2))
    assert not kept.put(body(1, at_s=9.0))  # late
    assert not kept.put(body(2))  # sent twice
    assert kept.newest(None) == body(2)
    assert kept.newest(("a", 1)) == body(2)
    assert kept.newest(("a", 2)) is None
    assert kept.newest(("b", 2)) == body(2)


def test_of_two_controllers_the_one_counts_that_looked_last() -> None:
    kept = Board()
    kept.put(body(70, "old", at_s=100.0))
    assert kept.put(body(1, "new", at_s=101.0))
    assert not kept.put(body(71, "old", at_s=100.5))  # it was on its way when the other took over
    assert kept.newest(None) == body(1, "new", at_s=101.0)
    assert kept.put(body(2, "new", at_s=101.5))


def test_a_silent_controller_gives_way_to_one_whose_clock_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Board()
    kept.put(body(70, "old", at_s=100.0))
    assert not kept.put(body(1, "new", at_s=40.0))
    monkeypatch.setattr(board, "STALE_S", -1.0)  # as if so much time had passed
    assert kept.put(body(2, "new", at_s=41.0))
    assert kept.newest(None) == body(2, "new", at_s=41.0)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"controller": "a"}', b"\xff", b"[" * 100_000])
def test_what_is_no_report_is_refused_and_changes_nothing(text: bytes) -> None:
    kept = Board()
    kept.put(body(1))
    with pytest.raises(NoReport, match="no report"):
        kept.put(text)
    assert kept.newest(None) == body(1)
    assert stamp_of(body(1)).since == ("a", 1)


def test_a_report_that_is_too_large_is_refused_with_bound_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MAX_REPORT_BYTES", 10)
    with pytest.raises(NoReport, match=rf"a report of {len(body(1))} bytes, at most 10 are taken"):
        Board().put(body(1))


def test_readers_wait_for_a_report_other_than_theirs() -> None:
    async def work() -> None:
        kept = Board()
        assert await kept.wait(None, 0.0) is None
        assert await kept.wait(None, 0.01) is None
        first = [asyncio.create_task(kept.wait(None, 30.0)) for _ in range(3)]
        await asyncio.sleep(0)
        kept.put(body(1))
        assert await asyncio.gather(*first) == [body(1)] * 3
        assert await kept.wait(None, 0.0) == body(1)
        assert await kept.wait(("a", 1), 0.0) is None
        second = asyncio.create_task(kept.wait(("a", 1), 30.0))
        await asyncio.sleep(0)
        kept.put(body(1))  # nothing new
        await asyncio.sleep(0)
        assert not second.done()
        kept.put(body(2))
        assert await second == body(2)

    asyncio.run(asyncio.wait_for(work(), 60))

"""Bytes: what a look at the host tells while loads are under way, and who goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keystage.keysmanager.budget import Candidate, Pool, order, rounded, seen, seen_huge, text, victims

MIB = 1 << 20


def candidate(name: str, used_at_s: float, rank: int | None = None, nbytes: int = 10) -> Candidate:
    return Candidate(name, nbytes, rank, used_at_s)


def test_a_look_with_nothing_under_way_tells_what_others_use() -> None:
    assert seen(Pool(), 500, 800, held_bytes=200, reserved_bytes=0) == Pool(800, 300)
    assert Pool(800, 300).free_bytes(200) == 300


def test_a_load_under_way_changes_the_estimate_only_as_far_as_it_must() -> None:
    before = Pool(800, 300)
    # Half of 100 is written: others are between 250 and 350, so still 300.
    assert seen(before, 550, 800, held_bytes=200, reserved_bytes=100) == before
    assert seen(before, 650, 800, held_bytes=200, reserved_bytes=100).others_bytes == 350
    assert seen(before, 450, 800, held_bytes=200, reserved_bytes=100).others_bytes == 250


def test_segments_that_are_charged_elsewhere_never_give_more_than_the_budget() -> None:
    assert seen(Pool(), 10, 800, held_bytes=200, reserved_bytes=0) == Pool(800, 0)


def test_huge_pages() -> None:
    pool = seen_huge(Pool(), 100, held_bytes=50, reserved_bytes=0)
    assert pool.free_bytes(50) == 100
    assert seen_huge(pool, 80, held_bytes=50, reserved_bytes=40) == pool


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1))
def test_others_that_stay_the_same_are_known_through_any_load(
    others: int, budget: int, held: int, reserved: int, filled: float
) -> None:
    pool = seen(Pool(), others + held, budget, held, 0)
    assert pool.others_bytes == others
    assert seen(pool, others + held + int(reserved * filled), budget, held, reserved) == pool


def test_unlisted_go_first_by_last_use_then_listed_by_lowest_rank() -> None:
    found = [
        candidate("first", 1.0, rank=0),
        candidate("new", 9.0),
        candidate("last", 99.0, rank=2),
        candidate("old", 2.0),
    ]
    assert [c.identity for c in order(found)] == ["old", "new", "last", "first"]


def test_victims_are_as_few_as_the_order_allows() -> None:
    found = [candidate("a", 1.0), candidate("b", 2.0), candidate("c", 3.0)]
    assert [c.identity for c in victims(found, 11) or []] == ["a", "b"]
    assert victims(found, 0) == []
    assert victims(found, 30) is not None
    assert victims(found, 31) is None


def test_pages_and_words() -> None:
    assert (rounded(1, 4096), rounded(4096, 4096), rounded(0, 4096)) == (4096, 4096, 0)
    assert (text(5 << 30), text(3 * MIB // 2)) == ("5.0 GiB", "1.5 MiB")

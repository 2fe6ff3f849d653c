"""What is kept of requests with a key, and what is forgotten first."""

from __future__ import annotations

import pytest

from keystage.router.engine import Failure, InvalidRequest, ProgramRefusal, QueueFull, Refusal, TooLate
from keystage.router.idempotency import (
    RECORD_BYTES,
    KeyBounds,
    Record,
    Stamp,
    Standing,
    Table,
    Whole,
    fingerprint_of,
    is_kept,
    is_resumable,
    name_of,
)


def record(name: str, body: bytes = b"") -> Record:
    made = Record(name, "f", Stamp(1, "", 0))
    made.whole = Whole(body, b"x")
    return made


def ended(table: Table, name: str, now_s: float, body: bytes = b"") -> Record:
    made = record(name, body)
    table.run(made)
    table.rest(made, now_s)
    made.end(Standing.ENDED)
    return made


def names(table: Table, among: str, now_s: float) -> str:
    # What is looked up counts as asked for: look at those that are there without touching them.
    return "".join(name for name in among if name in table._resting or name in table._running)


def test_the_answered_one_asked_for_the_longest_ago_goes_first() -> None:
    table = Table(KeyBounds(entries=3))
    for at_s, name in enumerate("abc"):
        ended(table, name, at_s)
    assert table.find("a", 3.0) is not None
    ended(table, "d", 4.0)
    assert names(table, "abcd", 4.0) == "acd"


def test_one_that_runs_is_never_forgotten() -> None:
    table = Table(KeyBounds(entries=1))
    running = [record(name) for name in "ab"]
    for each in running:
        table.run(each)
    ended(table, "c", 0.0)
    assert names(table, "abc", 0.0) == "ab"
    table.rest(running[0], 1.0)
    assert names(table, "abc", 1.0) == "b"


def test_bytes_at_rest_are_bounded_and_counted_to_nothing() -> None:
    table = Table(KeyBounds(size_bytes=3 * (RECORD_BYTES + 100)))
    kept = [ended(table, name, 0.0, b"x" * 100) for name in "abc"]
    assert table.nbytes == 3 * (RECORD_BYTES + 100)
    ended(table, "d", 1.0, b"x" * 101)
    assert names(table, "abcd", 1.0) == "cd"
    too_large = ended(table, "e", 2.0, b"x" * 10_000)
    assert names(table, "abcde", 2.0) == ""
    assert too_large.whole is not None  # who reads it still has it
    assert table.nbytes == 0
    table.forget(kept[2])
    assert table.nbytes == 0


def test_answers_are_forgotten_some_time_after_they_were_last_asked_for() -> None:
    table = Table(KeyBounds(kept_s=10))
    ended(table, "a", 0.0)
    ended(table, "b", 0.0)
    assert table.find("a", 9.0) is not None
    assert table.find("b", 10.0) is None
    assert table.find("a", 18.9) is not None
    assert table.find("a", 28.9) is None
    assert (len(table), table.nbytes) == (0, 0)


def test_one_that_paused_runs_on() -> None:
    table = Table(KeyBounds())
    made = ended(table, "a", 0.0)
    made.tokens.extend([1, 2])
    made.end(Standing.PAUSED)
    made.resume()
    table.run(made)
    assert (made.standing, made.released, len(table)) == (Standing.RUNNING, 2, 1)
    assert table.nbytes == 0 or table.nbytes < RECORD_BYTES
    assert list(table.running) == [made]


def test_readers_are_told_once_of_each_change() -> None:
    made = record("a")
    told: list[int] = []
    made.tokens.extend([5, 6, 7])
    made.when_news(lambda: told.append(made.released))
    made.release(2)
    made.release(3)
    assert told == [2]
    made.when_news(lambda: told.append(made.released))
    made.release(3)
    assert told == [2]
    made.end(Standing.ENDED)
    assert told == [2, 3]


def test_what_was_not_released_is_taken_back() -> None:
    made = record("a")
    made.tokens.extend([5, 6, 7])
    made.release(1)
    made.rewind()
    assert made.tokens.tolist() == [5]
    assert made.whole is None


class Poisoned(Failure):
    code = "poisoned"


@pytest.mark.parametrize(
    ("refusal", "kept", "resumable"),
    [
        (Failure("a stage failed"), True, False),
        (Poisoned("it ended two workers"), True, False),
        (ProgramRefusal("no such town", 404), False, False),
        (ProgramRefusal("broke", 500), True, False),
        (ProgramRefusal("not now", 503), False, True),
        (InvalidRequest("no room for it"), False, False),
        (QueueFull("full"), False, True),
        (TooLate("late"), False, True),
    ],
)
def test_which_refusals_are_answers(refusal: Refusal, kept: bool, resumable: bool) -> None:
    assert (is_kept(refusal), is_resumable(refusal)) == (kept, resumable)


def test_digests_tell_parts_apart() -> None:
    assert fingerprint_of([b"ab", b"c"]) != fingerprint_of([b"a", b"bc"])
    assert name_of("a", "k") != name_of("b", "k")
    assert name_of("", "k") == name_of("", "k")

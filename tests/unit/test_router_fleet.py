"""The router's workers: credit, choice, life, and the moves that even them out."""

from __future__ import annotations

import pytest

from keystage.router.fleet import DEAD_AFTER_S, Fleet
from keystage.router.paths import Bound, PathBook, plan_moves
from keystage.wire import api


def fleet(workers: dict[str, tuple[tuple[int, ...], int]], stages: int = 2, kv: int = 100) -> Fleet:
    made = Fleet(stages, "p")
    for name, (hosted, slots) in workers.items():
        hello = api.Hello(1, "p", hosted, name, "b", "emulated", slots, kv, 8, name, 1, "n", True)
        assert made.hello(name, hello, 0.0) is None
        made.credit(name, api.Credit(name, slots, kv))
        made.ready(name, 0.0)
    return made


def test_the_worker_with_most_free_slots_is_chosen_and_ties_go_to_the_smallest_name() -> None:
    f = fleet({"b": ((0,), 2), "a": ((0,), 2), "c": ((0,), 1)}, stages=1)
    assert f.choose_path(1) == ("a",)
    f.hold(["a", "b"])
    assert f.choose_path(1) == ("a",)
    f.hold(["a"])
    assert f.choose_path(1) == ("b",)
    assert f.choose_path(101) is None


def test_neighbouring_stages_of_one_worker_stay_together() -> None:
    f = fleet({"a": ((1,), 2), "g": ((0, 1), 2)})
    assert f.choose_path(1) == ("g", "g")
    f.hold(["g"], 1)
    assert f.choose_path(1) == ("g", "a")


def test_credit_is_taken_once_per_worker_and_given_back() -> None:
    f = fleet({"g": ((0, 1), 2)})
    f.hold(("g", "g"), 60)
    assert (f.workers["g"].held_slots, f.workers["g"].held_kv) == (1, 60)
    assert f.choose_path(60) is None
    f.give_back(("g", "g"), 60)
    assert f.choose_path(60) == ("g", "g")
    with pytest.raises(AssertionError):
        f.give_back(("g",))


def test_a_draining_or_silent_worker_gets_nothing() -> None:
    f = fleet({"a": ((0,), 2), "b": ((0,), 2)}, stages=1)
    assert f.draining("a") is f.workers["a"]
    assert f.draining("a") is None
    assert f.ready("a", 1.0) is None
    assert f.choose_path(1) == ("b",)
    assert f.silent(DEAD_AFTER_S) == []
    f.beat("a", api.Heartbeat("a", "draining", 0, 0, [0.0], [0], [0]), 3.0)
    assert f.silent(DEAD_AFTER_S + 0.1) == ["b"]
    f.remove("b")
    assert f.choose_path(1) is None
    f.give_back(["b"])


@pytest.mark.parametrize(("pipeline", "stages"), [("q", (0,)), ("p", (2,))])
def test_a_worker_of_something_else_is_refused(pipeline: str, stages: tuple[int, ...]) -> None:
    hello = api.Hello(1, pipeline, stages, "a", "b", "emulated", 1, 1, 8, "a", 1, "n", True)
    refused = Fleet(2, "p").hello("a", hello, 0.0)
    assert refused is not None
    assert pipeline in refused


def test_paths_are_numbered_once_and_go_with_their_workers() -> None:
    book = PathBook(10)
    path, is_new = book.get(("a", "b"))
    assert (path.number, path.owner, is_new) == (10, "a", True)
    assert book.get(("a", "b")) == (path, False)
    other, _ = book.get(("c", "b"))
    assert book.remove_through("a") == [path]
    assert book.by_number == {11: other}
    again, is_new = book.get(("a", "b"))
    assert (again.number, is_new) == (12, True)


def test_moves_even_out_and_never_exceed_the_credit_of_their_target() -> None:
    f = fleet({"a": ((0,), 8), "b": ((0,), 2)}, stages=1)
    f.hold(["a"], slots=7)
    sessions = [Bound(n, ("a",), 1) for n in range(7)]
    moves = plan_moves(f, 0, sessions)
    assert [(m.session, m.addresses) for m in moves] == [(6, ("b",)), (5, ("b",))]


def test_a_difference_of_one_moves_nothing() -> None:
    f = fleet({"a": ((0,), 8), "b": ((0,), 8)}, stages=1)
    assert plan_moves(f, 0, [Bound(1, ("a",), 1)]) == []


def test_sessions_leave_a_draining_worker_as_far_as_there_is_room() -> None:
    f = fleet({"a": ((0,), 8), "b": ((0,), 1)}, stages=1)
    f.draining("a")
    moves = plan_moves(f, 0, [Bound(1, ("a",), 1), Bound(2, ("a",), 1)])
    assert [m.session for m in moves] == [1]


def test_a_session_is_not_moved_to_a_worker_that_it_may_outgrow() -> None:
    f = fleet({"a": ((0,), 8), "b": ((0,), 8)}, stages=1)
    most = f.workers["b"].hello.kv_tokens
    f.hold(["a"], slots=4)
    small = [Bound(n, ("a",), 1, most) for n in range(4)]
    large = [Bound(n, ("a",), 1, most + 1) for n in range(4)]
    assert len(plan_moves(f, 0, small)) == 2
    assert plan_moves(f, 0, large) == []
    assert f.choose_path(1, most_kv=most) is not None
    assert f.choose_path(1, most_kv=most + 1) is None

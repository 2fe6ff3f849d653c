"""The session table of a worker: stale rows, epochs, tombstones, sessions that are dropped and come again."""

from __future__ import annotations

from keystage.wire.api import StepRows
from keystage.worker.sessions import SessionTable, Verdict

ROUTER = "ipc://router"


def rows(session: int, epoch: int, position: int, count: int, opens: int = 0) -> StepRows:
    return StepRows([session], [epoch], [position], [count], [True], [opens], [0.0], [1.0], [0])


def runs(table: SessionTable, *row: int, stage: int = 0) -> bool:
    wave = rows(*row)
    verdict = table.judge(wave, 0, ROUTER, stage)
    if verdict in (Verdict.STALE, Verdict.MISSING):
        return False
    if verdict is Verdict.OPEN:
        table.open(wave.sessions[0], wave.epochs[0], ROUTER)
    table.advance(wave, 0, stage)
    return True


def test_rows_follow_each_other_and_repeats_are_dropped() -> None:
    table = SessionTable()
    assert runs(table, 1, 1, 0, 4, 10)
    assert runs(table, 1, 1, 4, 1)
    assert not runs(table, 1, 1, 4, 1)
    assert not runs(table, 1, 1, 9, 1)
    assert not runs(table, 2, 1, 4, 1)
    assert table.positions(1) == 16
    assert table.positions(2) == 0


def test_a_row_that_was_not_run_does_not_count() -> None:
    table = SessionTable()
    assert runs(table, 1, 1, 0, 4, 10)
    assert table.judge(rows(1, 1, 4, 1), 0, ROUTER, 0) is Verdict.RUN
    assert not runs(table, 1, 1, 5, 1)
    assert runs(table, 1, 1, 4, 1)


def test_a_path_may_come_back_to_a_worker_at_a_later_stage() -> None:
    table = SessionTable()
    assert runs(table, 1, 1, 0, 4, 10, stage=0)
    assert runs(table, 1, 1, 0, 4, 10, stage=2)
    assert runs(table, 1, 1, 4, 1, stage=0)
    assert runs(table, 1, 1, 4, 1, stage=2)
    assert table.sessions == [1]


def test_a_higher_epoch_begins_anew() -> None:
    table = SessionTable()
    assert runs(table, 1, 1, 0, 4, 10)
    assert not runs(table, 1, 2, 4, 1)
    assert runs(table, 1, 2, 0, 4, 12)
    assert not runs(table, 1, 1, 4, 1)


def test_only_its_first_row_opens_a_session() -> None:
    table = SessionTable()
    assert not runs(table, 1, 1, 0, 4)
    assert not runs(table, 1, 1, 4, 4, 10)


def test_a_session_goes_on_under_a_higher_epoch_with_what_it_has() -> None:
    table = SessionTable()
    assert runs(table, 1, 1, 0, 20, 40, stage=0)
    on = rows(1, 2, 18, 2, 40)
    assert table.judge(on, 0, ROUTER, 0) is Verdict.ADOPT
    assert table.judge(rows(1, 2, 21, 1, 40), 0, ROUTER, 0) is Verdict.MISSING
    assert table.judge(rows(2, 2, 18, 2, 40), 0, ROUTER, 0) is Verdict.MISSING
    assert runs(table, 1, 1, 0, 19, 40, stage=2)
    assert table.judge(rows(1, 2, 20, 1, 40), 0, ROUTER, 0) is Verdict.MISSING
    table.adopt(1, 2, 18)
    # A row of the earlier epoch that was on its way is stale now; the path comes back at stage 2.
    assert not runs(table, 1, 1, 20, 1)
    assert runs(table, 1, 2, 18, 2, 40, stage=0)
    assert runs(table, 1, 2, 18, 2, 40, stage=2)
    assert runs(table, 1, 2, 20, 1, stage=0)


def test_state_that_comes_from_another_worker_is_placed_unless_nobody_wants_it() -> None:
    table = SessionTable()
    assert table.place(1, 3, ROUTER, 1, 20)
    assert not table.place(1, 3, ROUTER, 1, 20)
    assert (table.reach(1, 3), table.reach(1, 2)) == (20, 0)
    assert table.judge(rows(1, 4, 20, 1, 40), 0, ROUTER, 1) is Verdict.ADOPT
    assert table.release(1, 3)
    assert not table.place(1, 3, ROUTER, 1, 20)
    table.void_below(ROUTER, 100)
    assert not table.place(7, 1, ROUTER, 1, 20)


def test_a_late_row_does_not_bring_a_released_session_back() -> None:
    table = SessionTable()
    assert not table.release(1, 1)
    assert not runs(table, 1, 1, 0, 4, 10)
    assert runs(table, 1, 2, 0, 4, 10)
    assert not table.release(1, 1)
    assert table.release(1, 2)
    assert len(table) == 0


def test_a_dropped_session_may_be_opened_again_under_the_same_epoch() -> None:
    table = SessionTable()
    assert runs(table, 1, 2, 0, 4, 10)
    assert not table.drop(1, 1)
    assert table.drop(1, 2)
    assert not table.drop(1, 2)
    assert not runs(table, 1, 2, 4, 1)
    assert runs(table, 1, 2, 0, 5, 10)


def test_sessions_of_an_earlier_router_are_never_opened() -> None:
    table = SessionTable()
    table.void_below(ROUTER, 1000)
    assert not runs(table, 999, 1, 0, 4, 10)
    assert runs(table, 1000, 1, 0, 4, 10)
    assert table.judge(rows(5, 1, 0, 1, 1), 0, "ipc://another", 0) is Verdict.OPEN

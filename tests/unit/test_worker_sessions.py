"""The session table of a worker: stale rows, reservations, tombstones."""

from __future__ import annotations

from keystage.wire.api import StepRows
from keystage.worker.sessions import SessionTable

ROUTER = "ipc://router"


def rows(session: int, epoch: int, position: int, count: int, opens: int = 0) -> StepRows:
    return StepRows([session], [epoch], [position], [count], [True], [opens], [0.0], [1.0], [0])


def runs(table: SessionTable, *row: int, stage: int = 0) -> bool:
    return table.admit(rows(*row), ROUTER, stage).keep == [0]


def test_rows_follow_each_other_and_repeats_are_dropped() -> None:
    table = SessionTable(100)
    assert runs(table, 1, 1, 0, 4, 10)
    assert runs(table, 1, 1, 4, 1)
    assert not runs(table, 1, 1, 4, 1)
    assert not runs(table, 1, 1, 9, 1)
    assert not runs(table, 2, 1, 4, 1)
    assert table.reserved == 10


def test_a_path_may_come_back_to_a_worker_at_a_later_stage() -> None:
    table = SessionTable(100)
    assert runs(table, 1, 1, 0, 4, 10, stage=0)
    assert runs(table, 1, 1, 0, 4, 10, stage=2)
    assert runs(table, 1, 1, 4, 1, stage=0)
    assert runs(table, 1, 1, 4, 1, stage=2)
    assert (len(table), table.reserved) == (1, 10)


def test_a_higher_epoch_replaces_the_reservation() -> None:
    table = SessionTable(12)
    assert runs(table, 1, 1, 0, 4, 10)
    assert runs(table, 1, 2, 0, 4, 12)
    assert not runs(table, 1, 1, 4, 1)
    assert table.reserved == 12


def test_what_exceeds_the_room_is_refused_and_takes_none() -> None:
    table = SessionTable(15)
    assert runs(table, 1, 1, 0, 4, 10)
    admission = table.admit(rows(2, 1, 0, 3, 6), ROUTER, 0)
    assert (admission.keep, admission.refused) == ([], [0])
    assert table.reserved == 10


def test_a_late_row_does_not_bring_a_released_session_back() -> None:
    table = SessionTable(100)
    assert not table.release(1, 1)
    assert not runs(table, 1, 1, 0, 4, 10)
    assert runs(table, 1, 2, 0, 4, 10)
    assert not table.release(1, 1)
    assert table.release(1, 2)
    assert (len(table), table.reserved) == (0, 0)


def test_sessions_of_an_earlier_router_are_never_opened() -> None:
    table = SessionTable(100)
    table.void_below(ROUTER, 1000)
    assert not runs(table, 999, 1, 0, 4, 10)
    assert runs(table, 1000, 1, 0, 4, 10)
    assert table.admit(rows(5, 1, 0, 1, 1), "ipc://another", 0).keep == [0]

"""What of a wave runs at a worker with few KV blocks, and who goes first when several owners share it."""

from __future__ import annotations

from keystage.wire.api import Step, StepRows
from keystage.worker.claims import NEWEST, Claims
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor
from keystage.worker.intake import Intake, Taken
from keystage.worker.sessions import SessionTable

Row = tuple[int, int, int, int]
"""(session, position, count, most positions if it opens)."""


class Worker:
    """One worker's intake over `blocks`."""

    def __init__(self, blocks: int) -> None:
        self.executor = EmulatedExecutor(EmulatedDevice(), 2, 8, 64, blocks)
        self.table = SessionTable()
        self.claims = Claims()
        self.intake = Intake("w", self.executor, self.table, self.claims)

    def take(
        self,
        *rows: Row,
        path: int = 1,
        stage: int = 1,
        drops: tuple[int, ...] = (),
        holds: tuple[int, ...] = (),
        claim: tuple[int, int] = (-1, 0),
        first: bool = True,
    ) -> Taken:
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
        sessions, positions, counts, opens = columns
        n = len(rows)
        wave = StepRows(
            sessions,
            [1] * n,
            positions,
            counts,
            [True] * n,
            opens,
            [0.0] * n,
            [1.0] * n,
            [0] * n,
            list(holds),
        )
        step = Step(
            path, 1, stage, "r", [], [], "", wave, [], None, list(drops), [1] * len(drops),
            claim=claim[0], claim_blocks=claim[1],
        )  # fmt: skip
        return self.intake.take(step, is_first_visit=first, has_input=True)


def test_rows_take_their_blocks_and_those_without_starve_unchanged() -> None:
    worker = Worker(3)
    taken = worker.take((1, 0, 20, 40), (2, 0, 16, 40))
    assert (taken.keep, taken.starved, taken.free_blocks) == ([0, 1], [], 0)
    taken = worker.take((1, 20, 1, 0), (2, 16, 1, 0))
    assert (taken.keep, taken.starved, taken.free_blocks) == ([0], [1], 0)
    # It did not run: the same row is still the next one.
    taken = worker.take((2, 16, 1, 0), drops=(1,))
    assert (taken.keep, taken.free_blocks) == ([0], 1)


def test_a_session_that_finds_no_blocks_is_not_open_here() -> None:
    worker = Worker(3)
    worker.take((1, 0, 40, 40))
    assert worker.take((2, 0, 1, 10)).starved == [0]
    assert worker.table.sessions == [1]
    taken = worker.take((2, 1, 1, 0))
    assert (taken.keep, taken.starved) == ([], [])


def test_a_replay_takes_all_it_needs_with_its_first_row() -> None:
    worker = Worker(4)
    taken = worker.take((1, 0, 16, 60), holds=(49,))
    assert (taken.keep, taken.free_blocks) == ([0], 0)


def test_what_never_fits_fails_with_the_numbers_and_is_not_tried_again() -> None:
    worker = Worker(4)
    [failure] = worker.take((1, 0, 16, 65)).failures
    assert (failure.row, failure.retryable) == (0, False)
    assert failure.reason == "prompt + max_tokens is 65 positions, 5 KV blocks; w has 4"


def test_drops_count_at_the_first_visit_only() -> None:
    worker = Worker(4)
    worker.take((1, 0, 16, 60), stage=0)
    assert worker.take((1, 0, 20, 60), stage=0, drops=(1,)).keep == [0]
    # The path comes back: the session that was dropped is open again by now.
    taken = worker.take((1, 0, 20, 60), stage=2, drops=(1,), first=False)
    assert (taken.keep, taken.free_blocks) == ([0], 2)


def test_a_younger_session_leaves_what_an_older_one_of_another_path_waits_for() -> None:
    worker = Worker(6)
    worker.take((1, 0, 48, 60), path=1)
    assert worker.take(path=2, claim=(5, 4)).room_blocks == 3
    taken = worker.take((9, 0, 1, 20), path=1)
    assert (taken.starved, taken.free_blocks, taken.room_blocks) == ([0], 3, 0)
    # One that is older still goes first, and who runs already may grow.
    assert worker.take((4, 0, 1, 20), path=1).keep == [0]
    assert worker.take((1, 48, 1, 0), path=1).keep == [0]
    # The claim ends with a wave of its path that claims nothing.
    assert worker.take(path=2).room_blocks == 1
    assert worker.take((9, 0, 1, 20), path=1).keep == [0]


def test_a_path_does_not_stand_in_its_own_way() -> None:
    worker = Worker(4)
    assert worker.take(path=2, claim=(5, 4)).room_blocks == 4
    assert worker.take((5, 0, 40, 60), path=2, claim=(6, 2)).keep == [0]


def test_claims_end_with_their_path_or_router() -> None:
    claims = Claims()
    claims.note(1, "r", 10, 3)
    claims.note(2, "r", 11, 4)
    claims.note(3, "other", 12, 5)
    assert claims.ahead_of(9, NEWEST) == 12
    assert claims.ahead_of(3, 12) == 7
    assert claims.ahead_of(2, 10) == 0
    claims.forget_path(1)
    assert claims.ahead_of(9, NEWEST) == 9
    claims.forget_router("r")
    assert (len(claims), claims.ahead_of(9, NEWEST)) == (1, 5)

"""Which rows of a wave run at a worker: the stale are left out, sessions open, their blocks are reserved.

Before it: `looping` with a wave that is next. After it: the executor runs the rows that are left. It
frees what the wave drops first, so that the rows find the blocks that their owner counted on, and
tells how many are free then. It preempts nobody: a row without blocks goes back to the owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from keystage.models.blocks import BLOCK_TOKENS, blocks_for
from keystage.wire.api import Step
from keystage.worker.claims import NEWEST, Claims
from keystage.worker.executor import CopiesState, Executor, StageError, TakesInput
from keystage.worker.sessions import SessionTable, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A row whose session cannot go on here."""

    row: int
    reason: str
    retryable: bool


@dataclasses.dataclass(slots=True)
class Taken:
    """What became of a wave's rows.

    Attributes:
        keep: indices of those that run.
        starved: indices of those without blocks.
        failures: those whose sessions end here.
        free_blocks: blocks free afterwards.
        room_blocks: those of them that no older session of another path waits for.
    """

    keep: list[int] = dataclasses.field(default_factory=list)
    starved: list[int] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    free_blocks: int = 0
    room_blocks: int = 0


class Intake:
    """The door of one worker's stages.

    Args:
        replica: name of the worker, for reasons.
        executor: holds the blocks.
        table: the sessions here.
        claims: who waits for blocks here.
        input_of: what a session's first stage works on beside its tokens, by session.
    """

    def __init__(
        self,
        replica: str,
        executor: Executor,
        table: SessionTable,
        claims: Claims,
        input_of: Callable[[int], bytes] = lambda _session: b"",
    ) -> None:
        self._replica = replica
        self._executor = executor
        self._table = table
        self._claims = claims
        self._input_of = input_of

    def take(self, step: Step, *, is_first_visit: bool, has_input: bool) -> Taken:
        """Takes a wave in.

        Args:
            step: the wave.
            is_first_visit: whether its path has not passed this worker at an earlier stage: drops
                count once, a session may be open again by the second time.
            has_input: whether there is anything to run its rows on.
        """
        if is_first_visit:
            for session, epoch in zip(step.drops, step.drop_epochs, strict=True):
                if self._table.drop(session, epoch):
                    self._executor.close(session)
            self._claims.note(step.path, step.router, step.claim, step.claim_blocks)
        taken = Taken()
        if has_input:
            for row in range(len(step.rows.sessions)):
                self._take_row(step, row, taken)
        taken.free_blocks, _ = self._executor.kv_blocks
        ahead = self._claims.ahead_of(step.path, step.claim if step.claim >= 0 else NEWEST)
        taken.room_blocks = max(0, taken.free_blocks - ahead)
        return taken

    def _take_row(self, step: Step, row: int, taken: Taken) -> None:
        rows = step.rows
        verdict = self._table.judge(rows, row, step.router, step.stage)
        if verdict is Verdict.STALE:
            return
        if verdict is Verdict.OPEN:
            is_held = self._open(step, row, taken)
        elif verdict is Verdict.ADOPT or verdict is Verdict.MISSING:
            is_held = verdict is Verdict.ADOPT and self._adopt(step, row)
            if not is_held:
                taken.starved.append(row)  # its owner replays it
        elif rows.counts[row] == 1 and rows.positions[row] % BLOCK_TOKENS:
            is_held = True  # one token within a block has its place since the block began
        else:
            is_held = self._executor.reserve(rows.sessions[row], rows.held_after(row))
            if not is_held:
                taken.starved.append(row)
        if is_held:
            self._table.advance(rows, row, step.stage)
            taken.keep.append(row)

    def _adopt(self, step: Step, row: int) -> bool:
        """Goes on with what the session has from an earlier epoch."""
        rows = step.rows
        session, position = rows.sessions[row], rows.positions[row]
        if not isinstance(self._executor, CopiesState) or not self._executor.rewind(session, position):
            return False
        if not self._executor.reserve(session, rows.held_after(row)):
            return False
        self._table.adopt(session, rows.epochs[row], position)
        return True

    def _give(self, session: int, data: bytes) -> None:
        if not isinstance(self._executor, TakesInput):
            self._executor.close(session)
            raise StageError(
                f"{self._replica} takes tokens only, a session came with {len(data)} bytes of input"
            )
        self._executor.take_input(session, data)

    def _open(self, step: Step, row: int, taken: Taken) -> bool:
        """Opens a session with the blocks of its first row; False: it starves or fails."""
        rows = step.rows
        session, epoch, most = rows.sessions[row], rows.epochs[row], rows.opens[row]
        if self._table.drop(session, epoch):
            self._executor.close(session)  # what it had on an earlier path
        free, total = self._executor.kv_blocks
        if blocks_for(most) > total:
            reason = (
                f"prompt + max_tokens is {most} positions, {blocks_for(most)} KV blocks; "
                f"{self._replica} has {total}"
            )
            taken.failures.append(Failure(row, reason, False))
            return False
        ahead = self._claims.ahead_of(step.path, session)
        if blocks_for(rows.held_after(row)) + ahead > free:
            taken.starved.append(row)
            return False
        try:
            self._executor.open(session, most)
            if step.stage == 0 and (data := self._input_of(session)):
                self._give(session, data)
        except StageError as error:
            taken.failures.append(Failure(row, str(error), error.retryable))
            return False
        if not self._executor.reserve(session, rows.held_after(row)):
            self._executor.close(session)
            taken.starved.append(row)
            return False
        self._table.open(session, epoch, step.router)
        return True
